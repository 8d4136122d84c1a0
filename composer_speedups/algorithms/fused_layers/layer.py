"""An encoder layer of BERT's kind as one autograd function; its forward pass is four matmuls and four kernels.

DeBERTa's layers have another attention kernel, MPNet's a bias in its attention, and Jina's rotary positions.

Shapes: T packed tokens, H hidden units, F feed-forward units, A heads, D units per head, L a bound on the length of a
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.kernels.attention import attention_backward, attention_forward
from composer_speedups.kernels.casts import cast_together
from composer_speedups.kernels.disentangled_attention import disentangled_backward, disentangled_forward
from composer_speedups.kernels.dropout import draw_seeds
from composer_speedups.kernels.first_derivative import FirstDerivative
from composer_speedups.kernels.gelu import gelu_backward, gelu_forward
from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward
from composer_speedups.kernels.rotary import rotate
from composer_speedups.kernels.sums import partial_sums, totals

NO_SECOND_DERIVATIVE = (
    "fused_layers has no second derivative (create_graph=True); call undo_fused_layers(model), or remove fused_layers"
)


def fused_layer(
    x_TH: Tensor,
    modules: LayerModules,
    rates: DropoutRates,
    cu_seqlens: Tensor,
    longest: int,
    bias: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the layer's output (T, H) for packed tokens on a GPU.

    Args:
        x_TH: The layer's input, bf16 or fp16. Matmuls have its dtype; sums and statistics are float32.
        modules, rates: The layer's modules and dropout rates.
        cu_seqlens, longest: See :class:`~composer_speedups.packing.tokens.TokenLayout`.
        bias: Added to the scaled scores by distance, float32 (A, 2·L + 1); it gets a gradient. None adds nothing.
        angles: Cosines and sines of the angles by which queries and keys are rotated, (T, D) each, or None.
    """
    positions = (None, None, bias, *(angles or (None, None)))
    return _Layer.apply(x_TH, cu_seqlens, longest, modules, rates, *positions, *modules.parameters())


def disentangled_layer(
    x_TH: Tensor,
    modules: LayerModules,
    rates: DropoutRates,
    positions: Tensor,
    entries: Tensor,
    cu_seqlens: Tensor,
    longest: int,
) -> Tensor:
    """Compute a DeBERTa layer's output (T, H), like :func:`fused_layer`.

    For ``positions`` (P, 2·H), which get a gradient, and ``entries``, see
    :func:`~composer_speedups.kernels.disentangled_attention.disentangled_forward`.
    """
    given = (positions, entries, None, None, None)
    return _Layer.apply(x_TH, cu_seqlens, longest, modules, rates, *given, *modules.parameters())


class _Layer(FirstDerivative):
    refusal = NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cu: Tensor,
        longest: int,
        modules: LayerModules,
        rates: DropoutRates,
        positions: Tensor | None,
        entries: Tensor | None,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        x = x.contiguous()
        bias, cos, sin = (None if given is None else given.contiguous() for given in (bias, cos, sin))
        (qkv_w, out_w, up_w, down_w), (qkv_b, out_b, up_b, down_b) = products(parameters, x.dtype)
        norm1_w, norm1_b, norm2_w, norm2_b = (parameters[i] for i in (8, 9, 14, 15))
        seeds = draw_seeds(3, x.device, dropout=any(rates))
        qkv = torch.addmm(qkv_b, x, qkv_w.t())
        if cos is not None and sin is not None:
            rotate(qkv, cos, sin, modules.heads)
        attention_inputs = (cu, longest, modules.heads, rates.attention_weights, seeds[0])
        if positions is None or entries is None:
            attended, logs = attention_forward(qkv, *attention_inputs, bias=bias)
        else:
            attended, logs = disentangled_forward(qkv, positions, entries, *attention_inputs)
        summed1 = torch.addmm(out_b, attended, out_w.t())
        eps = modules.attention_norm.eps, modules.output_norm.eps
        hidden, summed1, stats1 = add_norm_forward(summed1, x, norm1_w, norm1_b, eps[0], rates.attention, seeds[1])
        up = torch.addmm(up_b, hidden, up_w.t())
        summed2 = torch.addmm(down_b, gelu_forward(up), down_w.t())
        out, summed2, stats2 = add_norm_forward(summed2, hidden, norm2_w, norm2_b, eps[1], rates.output, seeds[2])
        ctx.save_for_backward(
            x, qkv, attended, logs, summed1, stats1, up, summed2, stats2, cu, *seeds,
            qkv_w, out_w, up_w, down_w, norm1_w, norm1_b, norm2_w, positions, entries, bias, cos, sin,
        )  # fmt: skip
        ctx.longest, ctx.rates, ctx.heads = longest, rates, modules.heads
        ctx.dtypes = [p.dtype for p in parameters]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, qkv, attended, logs, summed1, stats1, up, summed2, stats2, cu, seed0, seed1, seed2,
         qkv_w, out_w, up_w, down_w, norm1_w, norm1_b, norm2_w, positions, entries, bias, cos, sin
        ) = ctx.saved_tensors  # fmt: skip
        rates = ctx.rates
        # Without dropout, the first two gradients of a norm are the same tensor, so it is added to only after the
        # matmuls that read it.
        d_hidden, d_down, sums2, _ = add_norm_backward(grad.contiguous(), summed2, stats2, norm2_w, rates.output, seed2)
        d_up, activated, sums_up = gelu_backward(torch.mm(d_down, down_w), up)
        d_down_w = weight_gradient(d_down, activated, ctx.dtypes[12])
        del activated, d_down
        d_hidden.addmm_(d_up, up_w)
        d_x, d_out, sums1, hidden = add_norm_backward(
            d_hidden, summed1, stats1, norm1_w, rates.attention, seed1, norm1_b
        )
        assert hidden is not None
        d_up_w = weight_gradient(d_up, hidden, ctx.dtypes[10])
        del d_up, hidden
        d_out_w = weight_gradient(d_out, attended, ctx.dtypes[6])
        d_attended, d_positions = torch.mm(d_out, out_w), None
        d_bias = None if bias is None else torch.empty_like(bias)
        attention_inputs = (attended, logs, cu, ctx.longest, rates.attention_weights, seed0)
        if positions is None:
            d_qkv, sums_qkv = attention_backward(d_attended, qkv, *attention_inputs, bias=bias, grad_bias=d_bias)
            if cos is not None:
                rotate(d_qkv, cos, sin, ctx.heads, back=True)
                sums_qkv = partial_sums(d_qkv)
        else:
            d_qkv, d_positions = disentangled_backward(d_attended, qkv, positions, entries, *attention_inputs)
            d_positions = d_positions.to(positions.dtype)
            sums_qkv = partial_sums(d_qkv)
        d_weights = weight_gradient(d_qkv, x, ctx.dtypes[0]), d_out_w, d_up_w, d_down_w
        gradients = parameter_gradients(ctx.dtypes, d_weights, (sums2, sums_up, sums1, sums_qkv))
        d_x.addmm_(d_qkv, qkv_w)
        return d_x, None, None, None, None, d_positions, None, d_bias, None, None, *gradients


def products(parameters: Sequence[Tensor], dtype: torch.dtype, kinds: Sequence[int] = (0, 1)) -> list[list[Tensor]]:
    """Return the four matmuls' weights (kind 0) and biases (kind 1) in a dtype; query, key and value are one matmul."""
    copies = iter(cast_together([parameters[i + kind] for kind in kinds for i in (0, 2, 4, 6, 10, 12)], dtype))
    results = []
    for _ in kinds:
        query, _, _, *others = (next(copies) for _ in range(6))
        # The copies of query, key and value follow one another in memory.
        three = query.as_strided((3 * len(query), *query.shape[1:]), query.stride())
        results.append([three, *others])
    return results


def parameter_gradients(
    dtypes: Sequence[torch.dtype], weights: Sequence[Tensor], partial_sums: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of a layer's parameters, in their order and dtypes.

    Args:
        dtypes: The parameters' dtypes.
        weights: Gradients of the four matmuls' weights: qkv, out, up, down.
        partial_sums: Of the second norm, of the up projection, of the first norm and of qkv, from their kernels.
    """
    (d_qkv_w, d_out_w, d_up_w, d_down_w), (norm2, d_up_b, norm1, d_qkv_b) = weights, totals(partial_sums)
    gradients = [g for pair in zip(d_qkv_w.chunk(3), d_qkv_b.chunk(3), strict=True) for g in pair]
    gradients += [d_out_w, norm1[2], norm1[0], norm1[1], d_up_w, d_up_b, d_down_w, norm2[2], norm2[0], norm2[1]]
    return [g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]


def weight_gradient(grad_TO: Tensor, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute a weight's gradient (O, I); torch 2.8 and newer write float32 directly."""
    if dtype == torch.float32 and grad_TO.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(grad_TO.t(), x_TI, out_dtype=torch.float32)
    return torch.mm(grad_TO.t(), x_TI)
