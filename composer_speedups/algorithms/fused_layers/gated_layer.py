"""An encoder layer with pre-norms, rotary positions and a gated feed-forward layer as one autograd function.

The residual stream is float32, because no norm rescales it; all matmuls are in the autocast dtype.

Shapes: T packed tokens, H hidden units, D units per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.layer import NO_SECOND_DERIVATIVE
from composer_speedups.algorithms.fused_layers.products import in_dtypes, weight_gradient
from composer_speedups.families.family import DropoutRates, GatedLayerModules
from composer_speedups.kernels.attention import attention_backward, attention_forward, rotate
from composer_speedups.kernels.dropout import draw_seeds
from composer_speedups.kernels.gelu import geglu_backward, geglu_forward
from composer_speedups.kernels.host import FirstDerivative
from composer_speedups.kernels.norm import pre_norm_backward, pre_norm_forward


def gated_layer(
    x_TH: Tensor,
    modules: GatedLayerModules,
    rates: DropoutRates,
    cos_TD: Tensor,
    sin_TD: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the layer's output, float32 (T, H), for packed tokens on a GPU.

    Args:
        x_TH: The residual stream.
        modules, rates: The layer's modules and dropout rates; ``rates.output`` is for the feed-forward layer's inner
            units.
        cos_TD, sin_TD: Cosines and sines of the tokens' rotary angles.
        cu_seqlens, longest: See :class:`~composer_speedups.packing.layout.Layout`.
        dtype: Dtype of the matmuls, bf16 or fp16; sums and statistics are float32.
    """
    return _GatedLayer.apply(x_TH, cos_TD, sin_TD, cu_seqlens, longest, modules, rates, dtype, *modules.parameters())


class _GatedLayer(FirstDerivative):
    refusal = NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu: Tensor,
        longest: int,
        modules: GatedLayerModules,
        rates: DropoutRates,
        dtype: torch.dtype,
        *parameters: Tensor,
    ) -> Tensor:
        x, cos, sin = x.float().contiguous(), cos.contiguous(), sin.contiguous()
        qkv_w, out_w, up_w, down_w = _in_dtype(parameters[:4], dtype)
        norms = parameters[4:]  # of the attention, if it has one, and of the feed-forward layer
        seeds = draw_seeds(3, x.device, dropout=any(rates))
        normed, stats1 = x.to(dtype), x.new_empty(0)
        if modules.attention_norm is not None:
            normed, _, stats1 = pre_norm_forward(x, None, norms[0], modules.attention_norm.eps, 0.0, seeds[0], dtype)
        qkv = torch.mm(normed, qkv_w.t())
        del normed
        rotate(qkv, cos, sin, modules.heads)
        attended, logs = attention_forward(
            qkv, cu, longest, modules.heads, rates.attention_weights, seeds[0], modules.window
        )
        normed, summed, stats2 = pre_norm_forward(
            x, torch.mm(attended, out_w.t()), norms[-1], modules.output_norm.eps, rates.attention, seeds[1], dtype
        )
        up = torch.mm(normed, up_w.t())
        del normed
        out = summed + torch.mm(geglu_forward(up, rates.output, seeds[2]), down_w.t())
        ctx.save_for_backward(
            x, stats1, qkv, attended, logs, summed, stats2, up, cos, sin, cu, *seeds,
            qkv_w, out_w, up_w, down_w, *norms,
        )  # fmt: skip
        ctx.longest, ctx.rates, ctx.heads, ctx.window = longest, rates, modules.heads, modules.window
        ctx.dtypes = [p.dtype for p in parameters]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, stats1, qkv, attended, logs, summed, stats2, up, cos, sin, cu, seed0, seed1, seed2,
         qkv_w, out_w, up_w, down_w, *norms) = ctx.saved_tensors  # fmt: skip
        rates, dtypes, dtype, wanted = ctx.rates, ctx.dtypes, qkv.dtype, ctx.needs_input_grad[_FIRST:]
        grad = grad.contiguous()
        d_down = grad.to(dtype)
        d_up, gated = geglu_backward(torch.mm(d_down, down_w), up, rates.output, seed2)
        d_down_w = weight_gradient(d_down, gated, dtypes[3]) if wanted[3] else None
        del d_down, gated
        d_x, d_out, d_norm2, normed = pre_norm_backward(
            torch.mm(d_up, up_w), grad, summed, stats2, norms[-1], rates.attention, seed1, sublayer=True
        )
        assert d_out is not None
        d_up_w = weight_gradient(d_up, normed, dtypes[2]) if wanted[2] else None
        del d_up, normed
        d_out_w = weight_gradient(d_out, attended, dtypes[1]) if wanted[1] else None
        d_qkv, _ = attention_backward(
            torch.mm(d_out, out_w), qkv, attended, logs, cu, ctx.longest, rates.attention_weights, seed0, ctx.window
        )
        rotate(d_qkv, cos, sin, ctx.heads, back=True)
        d_normed, d_norms = torch.mm(d_qkv, qkv_w), [d_norm2]
        if stats1.numel():
            d_x, _, d_norm1, normed = pre_norm_backward(d_normed, d_x, x, stats1, norms[0], 0.0, seed0, sublayer=False)
            d_norms.insert(0, d_norm1)
        else:
            normed = x.to(dtype)
            d_x += d_normed
        d_qkv_w = weight_gradient(d_qkv, normed, dtypes[0]) if wanted[0] else None
        gradients = [d_qkv_w, d_out_w, d_up_w, d_down_w, *d_norms]
        found = in_dtypes(gradients, dtypes, wanted)
        return d_x if ctx.needs_input_grad[0] else None, *[None] * (_FIRST - 1), *found


_FIRST = 8  # number of the first parameter among the function's inputs


def _in_dtype(weights: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    targets = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(targets, list(weights))
    return targets
