"""An encoder layer of BERT's kind as one autograd function; its forward pass is four matmuls and four kernels.

DeBERTa's layers have another attention kernel, MPNet's a bias in its attention, and Jina's rotary positions. Only the
gradients that are wanted are computed: a frozen weight has no third matmul, and the first layer over frozen embeddings
has no input gradient.

With 8-bit operands, the kernel that computes a tensor also writes its 8-bit copy, for the matmul that reads it. The
16-bit tensor is only written if it is needed, for the residual or for a weight's gradient. Gradients of weights, and
adapters' products and gradients, are in 16 bits. See :mod:`~composer_speedups.kernels.float8` for the scales.

Shapes: T packed tokens, H hidden units, F feed-forward units, A heads, D units per head, L a bound on the length of a
row, P entries of the table of relative positions.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.weights import (
    PARAMETERS,
    WEIGHTS,
    LayerAdapters,
    gelu_and_z,
    gelu_gradients,
    gradients_of,
    parameter_gradients,
    products,
    tanh_gradients,
    weight_gradient,
)
from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.kernels.attention import attention_backward, attention_forward, rotate
from composer_speedups.kernels.common import FirstDerivative, gradient_buffer
from composer_speedups.kernels.disentangled_attention import disentangled_backward, disentangled_forward
from composer_speedups.kernels.dropout import draw_seeds
from composer_speedups.kernels.float8 import (
    ACTIVATION,
    GRADIENT,
    Float8,
    begin_scales,
    cast_float8,
    cast_weights,
    scaled_product,
)
from composer_speedups.kernels.gelu import gelu_float8
from composer_speedups.kernels.gelu_products import gelu_product
from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward
from composer_speedups.kernels.sums import partial_sums

NO_SECOND_DERIVATIVE = "fused_layers has no second derivative (create_graph=True); remove fused_layers"


class _Row(IntEnum):
    """Rows of a layer's scales: inputs of the forward matmuls, weights, and gradients last."""

    X = 0
    ATTENDED = auto()
    HIDDEN = auto()
    ACTIVATED = auto()
    QKV_WEIGHT = auto()
    OUT_WEIGHT = auto()
    UP_WEIGHT = auto()
    DOWN_WEIGHT = auto()
    D_QKV = auto()
    D_OUT = auto()
    D_UP = auto()
    D_DOWN = auto()


OPERANDS = [row.name.lower() for row in _Row]
_GRADIENTS = 4


class Positions(NamedTuple):
    """How a layer's attention uses positions; by default not at all."""

    bias: Tensor | None = None  # added to the scaled scores by distance, float32 (A, 2·L + 1); it gets a gradient
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines of the rotation of queries and keys, (T, D) each
    table: Tensor | None = None  # keys and queries of relative positions (P, 2·H), which get a gradient
    entries: Tensor | None = None  # of the table, for each distance; see disentangled_forward


NO_POSITIONS = Positions()


def fused_layer(
    x_TH: Tensor,
    modules: LayerModules,
    rates: DropoutRates,
    cu_seqlens: Tensor,
    longest: int,
    positions: Positions = NO_POSITIONS,
    scales: Tensor | None = None,
    *,
    learn: bool = False,
    tanh: bool = False,
) -> Tensor:
    """Compute the layer's output (T, H) for packed tokens on a GPU, in the dtype of ``x_TH``, bf16 or fp16.

    Sums and statistics are float32. With ``scales``, a row for each of :data:`OPERANDS`, the matmuls have 8-bit
    operands: ``x_TH`` is bf16, widths are multiples of 16, and positions are at most a bias. ``learn`` records this
    pass's magnitudes in them, for the next pass. ``tanh`` computes the tanh form of GELU, without ``scales``.
    """
    begun = None if scales is None else begin_scales(scales, _GRADIENTS, keep=learn)
    adapters = LayerAdapters.of(modules)
    given = (positions.table, positions.entries, positions.bias, *(positions.angles or (None, None)))
    parameters = modules.parameters()
    buffers = {i: gradient_buffer(parameters[i]) for i in WEIGHTS[3:]}  # query, key and value have one product
    inputs = (x_TH, cu_seqlens, longest, modules, rates, *given, begun, adapters, buffers, tanh)
    return _Layer.apply(*inputs, *parameters, *adapters.tensors())


def _operand(scales: Tensor | None, row: _Row, like: Tensor) -> Float8 | None:
    """The memory for the 8-bit copy of a tensor, which the kernel that computes it writes; None in 16 bits."""
    kind = GRADIENT if row >= _Row.D_QKV else ACTIVATION
    return None if scales is None else Float8.like(like, kind, scales[row])


def _matmul(x: Tensor, operand: Float8 | None, weight: Any, bias: Tensor) -> Tensor:
    """x · weightᵀ + bias, of 8-bit operands if there are some."""
    return torch.addmm(bias, x, weight.t()) if operand is None else scaled_product(operand, weight, bias.dtype, bias)


def _back(grad: Tensor, operand: Float8 | None, weight: Any) -> Tensor:
    """The gradient of a matmul's input."""
    return torch.mm(grad, weight) if operand is None else scaled_product(operand, weight, grad.dtype)


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
        table: Tensor | None,
        entries: Tensor | None,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        scales: Tensor | None,
        adapters: LayerAdapters,
        buffers: dict[int, Tensor | None],
        tanh: bool,
        *tensors: Tensor,
    ) -> Tensor:
        x, dtype, parameters = x.contiguous(), x.dtype, tensors[:PARAMETERS]
        bias, cos, sin = (None if given is None else given.contiguous() for given in (bias, cos, sin))
        weights: list[Any]
        saved: list[Tensor]  # the weights that the backward pass reads
        if scales is None:
            weights, (qkv_b, out_b, up_b, down_b) = products(
                parameters, dtype, merged=adapters.merged(parameters, dtype)
            )
            saved = weights
        else:
            merged = adapters.merged(parameters, parameters[0].dtype)
            rows = scales[_Row.QKV_WEIGHT : _Row.DOWN_WEIGHT + 1]
            weights, turned = cast_weights(merged or [parameters[i] for i in WEIGHTS], rows.unbind())
            del merged
            ((qkv_b, out_b, up_b, down_b),) = products(parameters, dtype, kinds=(1,))
            saved = [weight.values for weight in turned]
            # Another forward pass before this backward pass may cast the weights with other scales.
            ctx.weight_scales = rows.clone().unbind()
        qkv_w, out_w, up_w, down_w = (cast(Any, weight) for weight in weights)
        norm1_w, norm1_b, norm2_w, norm2_b = (parameters[i] for i in (8, 9, 14, 15))
        seeds = draw_seeds(9 if adapters.drop else 3, x.device, dropout=any(rates) or adapters.drop)
        needs = ctx.needs_input_grad
        branches = adapters.branches(seeds[3:], dtype, needs[_ADAPTERS:])
        on_qkv, on_out, on_up, on_down = branches
        qkv = _matmul(x, None if scales is None else cast_float8(x, scales[_Row.X]), qkv_w, qkv_b)
        z_qkv = on_qkv.forward(x, qkv)
        if cos is not None and sin is not None:
            rotate(qkv, cos, sin, modules.heads)
        attended8 = _operand(scales, _Row.ATTENDED, x)
        attention_inputs = (cu, longest, modules.heads, rates.attention_weights, seeds[0])
        if table is None or entries is None:
            attended, logs = attention_forward(qkv, *attention_inputs, operand=attended8, bias=bias)
        else:
            attended, logs = disentangled_forward(qkv, table, entries, *attention_inputs)
        summed1 = _matmul(attended, attended8, out_w, out_b)
        z_out = on_out.forward(attended, summed1)
        eps = modules.attention_norm.eps, modules.output_norm.eps
        hidden8 = _operand(scales, _Row.HIDDEN, x)
        hidden, summed1, stats1 = add_norm_forward(
            summed1, x, norm1_w, norm1_b, eps[0], rates.attention, seeds[1], hidden8
        )
        activated = kept = z_down = None  # kept: GELU's result, if the backward pass reads it
        if tanh and not on_up.drops:
            up, activated = gelu_product(hidden, up_w, up_b)
        else:
            up = _matmul(hidden, hidden8, up_w, up_b)
        z_up = on_up.forward(hidden, up)
        if scales is None:
            if activated is None:
                activated, z_down = gelu_and_z(on_down, up, tanh=tanh)
            summed2 = torch.addmm(down_b, activated, down_w.t())
            if z_down is None:
                z_down = on_down.forward(activated, summed2)
            if tanh and (needs[_FIRST + 12] or on_down.active):
                kept = activated
            del activated
        else:
            summed2 = scaled_product(gelu_float8(up, scales[_Row.ACTIVATED]), down_w, dtype, down_b)
            z_down = on_down.from_gelu(up, summed2)
        out, summed2, stats2 = add_norm_forward(summed2, hidden, norm2_w, norm2_b, eps[1], rates.output, seeds[2])
        needs_x = any(needs[_FIRST + i] for i in WEIGHTS[:3]) or adapters.read_input(needs[_ADAPTERS:])
        ctx.save_for_backward(
            x if needs_x else None, qkv, attended, logs, summed1, stats1, up, summed2, stats2, cu,
            *saved, norm1_w, norm1_b, norm2_w, table, entries, bias, cos, sin,
            z_qkv, z_out, z_up, z_down, kept, *seeds[:3],
        )  # fmt: skip
        ctx.longest, ctx.rates, ctx.heads, ctx.branches = longest, rates, modules.heads, branches
        ctx.scales, ctx.tanh, ctx.dtypes, ctx.buffers = scales, tanh, [p.dtype for p in parameters], buffers
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, qkv, attended, logs, summed1, stats1, up, summed2, stats2, cu,
         qkv_w, out_w, up_w, down_w, norm1_w, norm1_b, norm2_w, table, entries, bias, cos, sin,
         z_qkv, z_out, z_up, z_down, kept, *seeds) = ctx.saved_tensors  # fmt: skip
        rates, needs, scales = ctx.rates, ctx.needs_input_grad, ctx.scales
        if scales is not None:
            qkv_w, out_w, up_w, down_w = map(Float8, (qkv_w, out_w, up_w, down_w), ctx.weight_scales)
        wanted = needs[_FIRST:_ADAPTERS]
        on_qkv, on_out, on_up, on_down = ctx.branches
        # Without dropout, the first two gradients of a norm are the same tensor, so it is added to only after the
        # matmuls that read it.
        d_down8, d_up8 = _operand(scales, _Row.D_DOWN, grad), _operand(scales, _Row.D_UP, up)
        d_hidden, d_down, sums2, _ = add_norm_backward(
            grad.contiguous(), summed2, stats2, norm2_w, rates.output, seeds[2], operand=d_down8
        )
        if ctx.tanh:
            d_up, sums_up, d_down_w, dz_up = tanh_gradients(
                d_down, down_w, up, kept, on_down, z_down, wanted, ctx.dtypes, ctx.buffers[12]
            )
        else:
            d_up, sums_up, d_down_w, dz_up = gelu_gradients(
                _back(d_down, d_down8, down_w),
                up,
                d_down,
                on_up,
                on_down,
                z_up,
                z_down,
                wanted,
                ctx.dtypes,
                d_up8,
                ctx.buffers[12],
            )
        del d_down, d_down8, kept
        more = None
        if d_up8 is None:
            d_hidden.addmm_(d_up, up_w)
        else:
            more = scaled_product(d_up8, up_w, d_up.dtype)  # which the norm's kernel adds
        dz_up = on_up.through(d_up, z_up, d_hidden if more is None else more) if dz_up is None else dz_up
        d_out8 = _operand(scales, _Row.D_OUT, grad)
        d_x, d_out, sums1, hidden = add_norm_backward(
            d_hidden, summed1, stats1, norm1_w, rates.attention, seeds[1], norm1_b, more, d_out8
        )
        assert hidden is not None
        d_up_w = weight_gradient(d_up, hidden, ctx.dtypes[10], ctx.buffers[10]) if wanted[10] else None
        on_up.finish(hidden, dz_up)
        del d_up, d_up8, hidden, d_hidden, more
        d_out_w = weight_gradient(d_out, attended, ctx.dtypes[6], ctx.buffers[6]) if wanted[6] else None
        d_attended, d_qkv8, d_table = _back(d_out, d_out8, out_w), _operand(scales, _Row.D_QKV, qkv), None
        on_out.finish(attended, on_out.through(d_out, z_out, d_attended))
        d_bias = None if bias is None else torch.empty_like(bias)
        attention_inputs = (attended, logs, cu, ctx.longest, rates.attention_weights, seeds[0])
        if table is None:
            d_qkv, sums_qkv = attention_backward(
                d_attended, qkv, *attention_inputs, operand=d_qkv8, bias=bias, grad_bias=d_bias
            )
            if cos is not None:
                rotate(d_qkv, cos, sin, ctx.heads, back=True)
                sums_qkv = partial_sums(d_qkv)
        else:
            d_qkv, d_table = disentangled_backward(d_attended, qkv, table, entries, *attention_inputs)
            d_table = d_table.to(table.dtype)
            sums_qkv = partial_sums(d_qkv)
        d_qkv_w = weight_gradient(d_qkv, x, ctx.dtypes[0]) if any(wanted[i] for i in WEIGHTS[:3]) else None
        if needs[0] and d_qkv8 is None:
            d_x.addmm_(d_qkv, qkv_w)
        elif needs[0]:
            d_x += _back(d_qkv, d_qkv8, qkv_w)
        on_qkv.finish(x, on_qkv.through(d_qkv, z_qkv, d_x if needs[0] else None))
        d_weights = d_qkv_w, d_out_w, d_up_w, d_down_w
        gradients = parameter_gradients(ctx.dtypes, wanted, d_weights, (sums2, sums_up, sums1, sums_qkv))
        given = (d_x if needs[0] else None, *[None] * 4, d_table, None, d_bias, *[None] * 6)
        return *given, *gradients, *gradients_of(ctx.branches)


_FIRST = 14  # number of the first parameter among the function's inputs
_ADAPTERS = _FIRST + PARAMETERS  # number of the first tensor of an adapter
