"""An encoder layer of BERT's kind as one autograd function; its forward pass is four matmuls and four kernels.

DeBERTa's layers have another attention kernel, MPNet's a bias in its attention, and Jina's rotary positions. Only the
gradients that are wanted are computed: a frozen weight has no third matmul, and the first layer over frozen embeddings
has no input gradient.

Shapes: T packed tokens, H hidden units, F feed-forward units, A heads, D units per head, L a bound on the length of a
row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.low_rank import (
    LayerAdapters,
    gelu_and_z,
    gelu_gradients,
    gradients_of,
)
from composer_speedups.algorithms.fused_layers.products import (
    PARAMETERS,
    WEIGHTS,
    parameter_gradients,
    products,
    weight_gradient,
)
from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.kernels.attention import attention_backward, attention_forward
from composer_speedups.kernels.disentangled_attention import disentangled_backward, disentangled_forward
from composer_speedups.kernels.dropout import draw_seeds
from composer_speedups.kernels.first_derivative import FirstDerivative
from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward
from composer_speedups.kernels.rotary import rotate
from composer_speedups.kernels.sums import partial_sums

__all__ = ["NO_SECOND_DERIVATIVE", "disentangled_layer", "fused_layer"]

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
        modules, rates: The layer's modules, whose Linears may have adapters, and dropout rates.
        cu_seqlens, longest: See :class:`~composer_speedups.packing.tokens.TokenLayout`.
        bias: Added to the scaled scores by distance, float32 (A, 2·L + 1); it gets a gradient. None adds nothing.
        angles: Cosines and sines of the angles by which queries and keys are rotated, (T, D) each, or None.
    """
    adapters, tokens = LayerAdapters.of(modules), (cu_seqlens, longest)
    positions = (None, None, bias, *(angles or (None, None)))
    return _Layer.apply(x_TH, *tokens, modules, rates, *positions, adapters, *modules.parameters(), *adapters.tensors())


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
    adapters, tokens, given = LayerAdapters.of(modules), (cu_seqlens, longest), (positions, entries, None, None, None)
    return _Layer.apply(x_TH, *tokens, modules, rates, *given, adapters, *modules.parameters(), *adapters.tensors())


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
        adapters: LayerAdapters,
        *tensors: Tensor,
    ) -> Tensor:
        x, parameters = x.contiguous(), tensors[:PARAMETERS]
        bias, cos, sin = (None if given is None else given.contiguous() for given in (bias, cos, sin))
        (qkv_w, out_w, up_w, down_w), (qkv_b, out_b, up_b, down_b) = products(
            parameters, x.dtype, merged=adapters.merged(parameters, x.dtype)
        )
        norm1_w, norm1_b, norm2_w, norm2_b = (parameters[i] for i in (8, 9, 14, 15))
        seeds = draw_seeds(9 if adapters.drop else 3, x.device, dropout=any(rates) or adapters.drop)
        needs = ctx.needs_input_grad
        branches = adapters.branches(seeds[3:], x.dtype, needs[_ADAPTERS:])
        on_qkv, on_out, on_up, on_down = branches
        qkv = torch.addmm(qkv_b, x, qkv_w.t())
        z_qkv = on_qkv.forward(x, qkv)
        if cos is not None and sin is not None:
            rotate(qkv, cos, sin, modules.heads)
        attention_inputs = (cu, longest, modules.heads, rates.attention_weights, seeds[0])
        if positions is None or entries is None:
            attended, logs = attention_forward(qkv, *attention_inputs, bias=bias)
        else:
            attended, logs = disentangled_forward(qkv, positions, entries, *attention_inputs)
        summed1 = torch.addmm(out_b, attended, out_w.t())
        z_out = on_out.forward(attended, summed1)
        eps = modules.attention_norm.eps, modules.output_norm.eps
        hidden, summed1, stats1 = add_norm_forward(summed1, x, norm1_w, norm1_b, eps[0], rates.attention, seeds[1])
        up = torch.addmm(up_b, hidden, up_w.t())
        z_up = on_up.forward(hidden, up)
        activated, z_down = gelu_and_z(on_down, up)
        summed2 = torch.addmm(down_b, activated, down_w.t())
        if z_down is None:
            z_down = on_down.forward(activated, summed2)
        del activated
        out, summed2, stats2 = add_norm_forward(summed2, hidden, norm2_w, norm2_b, eps[1], rates.output, seeds[2])
        needs_x = any(needs[_FIRST + i] for i in WEIGHTS[:3]) or adapters.read_input(needs[_ADAPTERS:])
        ctx.save_for_backward(
            x if needs_x else None, qkv, attended, logs, summed1, stats1, up, summed2, stats2, cu,
            qkv_w, out_w, up_w, down_w, norm1_w, norm1_b, norm2_w, positions, entries, bias, cos, sin,
            z_qkv, z_out, z_up, z_down, *seeds[:3],
        )  # fmt: skip
        ctx.longest, ctx.rates, ctx.heads, ctx.branches = longest, rates, modules.heads, branches
        ctx.dtypes = [p.dtype for p in parameters]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, qkv, attended, logs, summed1, stats1, up, summed2, stats2, cu,
         qkv_w, out_w, up_w, down_w, norm1_w, norm1_b, norm2_w, positions, entries, bias, cos, sin,
         z_qkv, z_out, z_up, z_down, *seeds) = ctx.saved_tensors  # fmt: skip
        rates, needs = ctx.rates, ctx.needs_input_grad
        wanted = needs[_FIRST:_ADAPTERS]
        on_qkv, on_out, on_up, on_down = ctx.branches
        # Without dropout, the first two gradients of a norm are the same tensor, so it is added to only after the
        # matmuls that read it.
        d_hidden, d_down, sums2, _ = add_norm_backward(
            grad.contiguous(), summed2, stats2, norm2_w, rates.output, seeds[2]
        )
        d_up, sums_up, d_down_w, dz_up = gelu_gradients(
            torch.mm(d_down, down_w), up, d_down, on_up, on_down, z_up, z_down, wanted, ctx.dtypes
        )
        del d_down
        d_hidden.addmm_(d_up, up_w)
        dz_up = on_up.through(d_up, z_up, d_hidden) if dz_up is None else dz_up
        d_x, d_out, sums1, hidden = add_norm_backward(
            d_hidden, summed1, stats1, norm1_w, rates.attention, seeds[1], norm1_b
        )
        assert hidden is not None
        d_up_w = weight_gradient(d_up, hidden, ctx.dtypes[10]) if wanted[10] else None
        on_up.finish(hidden, dz_up)
        del d_up, hidden
        d_out_w = weight_gradient(d_out, attended, ctx.dtypes[6]) if wanted[6] else None
        d_attended, d_positions = torch.mm(d_out, out_w), None
        on_out.finish(attended, on_out.through(d_out, z_out, d_attended))
        d_bias = None if bias is None else torch.empty_like(bias)
        attention_inputs = (attended, logs, cu, ctx.longest, rates.attention_weights, seeds[0])
        if positions is None:
            d_qkv, sums_qkv = attention_backward(d_attended, qkv, *attention_inputs, bias=bias, grad_bias=d_bias)
            if cos is not None:
                rotate(d_qkv, cos, sin, ctx.heads, back=True)
                sums_qkv = partial_sums(d_qkv)
        else:
            d_qkv, d_positions = disentangled_backward(d_attended, qkv, positions, entries, *attention_inputs)
            d_positions = d_positions.to(positions.dtype)
            sums_qkv = partial_sums(d_qkv)
        d_qkv_w = weight_gradient(d_qkv, x, ctx.dtypes[0]) if any(wanted[i] for i in WEIGHTS[:3]) else None
        if needs[0]:
            d_x.addmm_(d_qkv, qkv_w)
        on_qkv.finish(x, on_qkv.through(d_qkv, z_qkv, d_x if needs[0] else None))
        d_weights = d_qkv_w, d_out_w, d_up_w, d_down_w
        gradients = parameter_gradients(ctx.dtypes, wanted, d_weights, (sums2, sums_up, sums1, sums_qkv))
        d_tensors = *gradients, *gradients_of(ctx.branches)
        return d_x if needs[0] else None, *[None] * 4, d_positions, None, d_bias, *[None] * 3, *d_tensors


_FIRST = 11  # number of the first parameter among the function's inputs
_ADAPTERS = _FIRST + PARAMETERS  # number of the first tensor of an adapter
