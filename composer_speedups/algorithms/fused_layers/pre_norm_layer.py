"""An encoder layer with pre-norms and BERT's feed-forward layer as one autograd function, such as ESM-2's.

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
from composer_speedups.algorithms.fused_layers.products import (
    in_dtypes,
    of_query_key_value,
    products,
    totals_of,
    weight_gradient,
)
from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.kernels.attention import attention_backward, attention_forward, rotate
from composer_speedups.kernels.dropout import draw_seeds
from composer_speedups.kernels.gelu import gelu_backward, gelu_forward
from composer_speedups.kernels.host import FirstDerivative
from composer_speedups.kernels.norm import pre_norm_backward, pre_norm_forward
from composer_speedups.kernels.sums import partial_sums


def pre_norm_layer(
    x_TH: Tensor,
    modules: LayerModules,
    rates: DropoutRates,
    angles: tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor,
    longest: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the layer's output, float32 (T, H), for packed tokens on a GPU.

    Args:
        x_TH: The residual stream.
        modules, rates: The layer's modules and dropout rates.
        angles: Cosines and sines of the angles by which queries and keys are rotated, (T, D) each, or None.
        cu_seqlens, longest: See :class:`~composer_speedups.packing.layout.Layout`.
        dtype: Dtype of the matmuls, bf16 or fp16; sums and statistics are float32.
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


_FIRST = 8  # number of the first parameter among the function's inputs
