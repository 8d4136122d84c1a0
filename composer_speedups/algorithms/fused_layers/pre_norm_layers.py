"""Encoder layers with pre-norms as one autograd function: with BERT's feed-forward layer, such as ESM-2's, or with a
gated one without biases and rotary positions, such as ModernBERT's.

The residual stream is float32, because no norm rescales it; all matmuls are in the autocast dtype. As in :mod:`.layer`,
only the gradients that are wanted are computed.

Shapes: T packed tokens, H hidden units, D units per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups.algorithms.fused_layers.layer import NO_SECOND_DERIVATIVE
from composer_speedups.algorithms.fused_layers.weights import (
    in_dtypes,
    of_query_key_value,
    products,
    totals_of,
    weight_gradient,
)
from composer_speedups.families.family import DropoutRates, GatedLayerModules, LayerModules
from composer_speedups.kernels.attention import attention_backward, attention_forward, rotate
from composer_speedups.kernels.common import FirstDerivative
from composer_speedups.kernels.dropout import draw_seeds
from composer_speedups.kernels.gelu import geglu_backward, geglu_forward, gelu_backward, gelu_forward
from composer_speedups.kernels.norm import pre_norm_backward, pre_norm_forward
from composer_speedups.kernels.sums import partial_sums

_FIRST = 8  # number of the first parameter among the functions' inputs


def pre_norm_layer(
    x_TH: Tensor,
    modules: LayerModules,
    rates: DropoutRates,
    angles: tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor,
    longest: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the layer's output, float32 (T, H), for packed tokens on a GPU from the residual stream (T, H).

    ``angles`` are cosines and sines of the angles by which queries and keys are rotated, (T, D) each. Matmuls are in
    ``dtype``, bf16 or fp16; sums and statistics are float32.
    """
    cos_TD, sin_TD = angles or (None, None)
    inputs = (cos_TD, sin_TD, cu_seqlens, longest, modules, rates, dtype)
    summed, down = _PreNormLayer.apply(x_TH, *inputs, *modules.parameters())
    return summed + F.dropout(down, rates.output)  # type: ignore[no-any-return]


class _PreNormLayer(FirstDerivative):
    """Returns the residual stream behind attention, float32 (T, H), and the feed-forward layer's result (T, H)."""

    refusal = NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        cu: Tensor,
        longest: int,
        modules: LayerModules,
        rates: DropoutRates,
        dtype: torch.dtype,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x = x.float().contiguous()
        cos, sin = (None if given is None else given.contiguous() for given in (cos, sin))
        (qkv_w, out_w, up_w, down_w), (qkv_b, out_b, up_b, down_b) = products(parameters, dtype)
        norm1_w, norm1_b, norm2_w, norm2_b = (parameters[i] for i in (8, 9, 14, 15))
        seeds = draw_seeds(2, x.device, dropout=any(rates[:2]))
        eps = modules.attention_norm.eps, modules.output_norm.eps
        normed, _, stats1 = pre_norm_forward(x, None, norm1_w, eps[0], 0.0, seeds[0], dtype, norm1_b)
        qkv = torch.addmm(qkv_b, normed, qkv_w.t())
        del normed
        if cos is not None and sin is not None:
            rotate(qkv, cos, sin, modules.heads)
        attended, logs = attention_forward(qkv, cu, longest, modules.heads, rates.attention_weights, seeds[0])
        out = torch.addmm(out_b, attended, out_w.t())
        normed, summed, stats2 = pre_norm_forward(x, out, norm2_w, eps[1], rates.attention, seeds[1], dtype, norm2_b)
        del out
        up = torch.addmm(up_b, normed, up_w.t())
        del normed
        down = torch.addmm(down_b, gelu_forward(up), down_w.t())
        ctx.save_for_backward(
            x, stats1, qkv, attended, logs, summed, stats2, up, cos, sin, cu, *seeds,
            qkv_w, out_w, up_w, down_w, norm1_w, norm1_b, norm2_w, norm2_b,
        )  # fmt: skip
        ctx.longest, ctx.rates, ctx.heads = longest, rates, modules.heads
        ctx.dtypes = [p.dtype for p in parameters]
        return summed, down

    @staticmethod
    def backward(ctx: Any, d_summed: Tensor, d_down: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, stats1, qkv, attended, logs, summed, stats2, up, cos, sin, cu, seed0, seed1,
         qkv_w, out_w, up_w, down_w, norm1_w, norm1_b, norm2_w, norm2_b) = ctx.saved_tensors  # fmt: skip
        rates, dtypes, d_down = ctx.rates, ctx.dtypes, d_down.contiguous()
        needs_x, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[_FIRST:]
        d_up, activated, sums_up = gelu_backward(torch.mm(d_down, down_w), up)
        d_down_w = weight_gradient(d_down, activated, dtypes[12]) if wanted[12] else None
        sums_down = partial_sums(d_down) if wanted[13] else None
        del activated, d_down
        d_x, d_out, d_norm2, normed = pre_norm_backward(
            torch.mm(d_up, up_w), d_summed.contiguous(), summed, stats2, norm2_w, rates.attention, seed1, norm2_b,
            sublayer=True,
        )  # fmt: skip
        assert d_out is not None
        d_up_w = weight_gradient(d_up, normed, dtypes[10]) if wanted[10] else None
        del d_up, normed
        d_out_w = weight_gradient(d_out, attended, dtypes[6]) if wanted[6] else None
        sums_out = partial_sums(d_out) if wanted[7] else None
        attention_inputs = (qkv, attended, logs, cu, ctx.longest, rates.attention_weights, seed0)
        sums_qkv: Tensor | None
        d_qkv, sums_qkv = attention_backward(torch.mm(d_out, out_w), *attention_inputs)
        del d_out
        if cos is not None:
            rotate(d_qkv, cos, sin, ctx.heads, back=True)
            sums_qkv = partial_sums(d_qkv) if any(wanted[1:6:2]) else None
        d_norm1 = d_qkv_w = None
        if needs_x or any(wanted[:6:2]) or any(wanted[8:10]):
            d_x, _, d_norm1, normed = pre_norm_backward(
                torch.mm(d_qkv, qkv_w), d_x, x, stats1, norm1_w, 0.0, seed0, norm1_b, sublayer=False
            )
            d_qkv_w = weight_gradient(d_qkv, normed, dtypes[0]) if any(wanted[:6:2]) else None
        d_qkv_b, d_out_b, d_up_b, d_down_b = totals_of([sums_qkv, sums_out, sums_up, sums_down])
        gradients = of_query_key_value(d_qkv_w, d_qkv_b)
        gradients += [d_out_w, d_out_b, *((None, None) if d_norm1 is None else d_norm1)]
        gradients += [d_up_w, d_up_b, d_down_w, d_down_b, *d_norm2]
        return d_x if needs_x else None, *[None] * (_FIRST - 1), *in_dtypes(gradients, dtypes, wanted)


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
    """As :func:`pre_norm_layer`; ``rates.output`` is for the feed-forward layer's inner units."""
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


def _in_dtype(weights: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    targets = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(targets, list(weights))
    return targets
