"""An encoder layer of BERT's kind as one autograd function with 8-bit matmuls.

Gradients of weights, and adapters' products and gradients, are in 16 bits. As in :mod:`.layer`, only the gradients that
are wanted are computed.

The kernel that computes a tensor also writes its 8-bit copy. The 16-bit tensor is only written if it is needed, for the
residual or for a weight's gradient. See :mod:`~composer_speedups.kernels.float8` for the scales.

Shapes: T packed tokens, H hidden units, F feed-forward units, A heads.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.layer import NO_SECOND_DERIVATIVE
from composer_speedups.algorithms.fused_layers.low_rank import LayerAdapters, gelu_gradients, gradients_of
from composer_speedups.algorithms.fused_layers.products import (
    PARAMETERS,
    WEIGHTS,
    parameter_gradients,
    products,
    weight_gradient,
)
from composer_speedups.families.family import DropoutRates, LayerModules
from composer_speedups.kernels.attention import attention_backward, attention_forward
from composer_speedups.kernels.dropout import draw_seeds
from composer_speedups.kernels.first_derivative import FirstDerivative
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
from composer_speedups.kernels.norm import add_norm_backward, add_norm_forward

__all__ = ["OPERANDS", "float8_layer"]


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


def float8_layer(
    x_TH: Tensor,
    modules: LayerModules,
    rates: DropoutRates,
    cu_seqlens: Tensor,
    longest: int,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    learn: bool,
) -> Tensor:
    """Compute the layer's output (T, H) for packed tokens on a GPU.

    Args:
        x_TH: The layer's input, bf16; sums and statistics are float32.
        modules, rates: The layer's modules, whose widths are multiples of 16 and whose Linears may have adapters, and
            dropout rates.
        cu_seqlens, longest: See :class:`~composer_speedups.packing.tokens.TokenLayout`.
        scales: One row per operand of :data:`OPERANDS`, from :func:`~composer_speedups.kernels.float8.new_scales`.
        bias: See :func:`.fused_layer`.
        learn: Record this pass's magnitudes in ``scales``, for the next pass.
    """
    begun = begin_scales(scales, _GRADIENTS, keep=learn)
    adapters, tokens = LayerAdapters.of(modules), (cu_seqlens, longest)
    return _Float8Layer.apply(
        x_TH, *tokens, modules, rates, begun, bias, adapters, *modules.parameters(), *adapters.tensors()
    )


class _Float8Layer(FirstDerivative):
    refusal = NO_SECOND_DERIVATIVE

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cu: Tensor,
        longest: int,
        modules: LayerModules,
        rates: DropoutRates,
        scales: Tensor,
        bias: Tensor | None,
        adapters: LayerAdapters,
        *tensors: Tensor,
    ) -> Tensor:
        x, dtype, parameters = x.contiguous(), x.dtype, tensors[:PARAMETERS]
        bias = None if bias is None else bias.contiguous()
        merged = adapters.merged(parameters, parameters[0].dtype)
        rows = scales[_Row.QKV_WEIGHT : _Row.DOWN_WEIGHT + 1]
        weights, turned = cast_weights(merged or [parameters[i] for i in WEIGHTS], rows.unbind())
        del merged
        qkv_w, out_w, up_w, down_w = weights
        ((qkv_b, out_b, up_b, down_b),) = products(parameters, dtype, kinds=(1,))
        norm1_w, norm1_b, norm2_w, norm2_b = (parameters[i] for i in (8, 9, 14, 15))
        seeds = draw_seeds(9 if adapters.drop else 3, x.device, dropout=any(rates) or adapters.drop)
        needs = ctx.needs_input_grad
        branches = adapters.branches(seeds[3:], dtype, needs[_ADAPTERS:])
        on_qkv, on_out, on_up, on_down = branches
        qkv = scaled_product(cast_float8(x, scales[_Row.X]), qkv_w, dtype, qkv_b)
        z_qkv = on_qkv.forward(x, qkv)
        attended8 = Float8.like(x, ACTIVATION, scales[_Row.ATTENDED])
        attended, logs = attention_forward(
            qkv, cu, longest, modules.heads, rates.attention_weights, seeds[0], operand=attended8, bias=bias
        )
        summed1 = scaled_product(attended8, out_w, dtype, out_b)
        z_out = on_out.forward(attended, summed1)
        eps = modules.attention_norm.eps, modules.output_norm.eps
        hidden8 = Float8.like(x, ACTIVATION, scales[_Row.HIDDEN])
        hidden, summed1, stats1 = add_norm_forward(
            summed1, x, norm1_w, norm1_b, eps[0], rates.attention, seeds[1], hidden8
        )
        up = scaled_product(hidden8, up_w, dtype, up_b)
        z_up = on_up.forward(hidden, up)
        summed2 = scaled_product(gelu_float8(up, scales[_Row.ACTIVATED]), down_w, dtype, down_b)
        z_down = on_down.from_gelu(up, summed2)
        out, summed2, stats2 = add_norm_forward(summed2, hidden, norm2_w, norm2_b, eps[1], rates.output, seeds[2])
        needs_x = any(needs[_FIRST + i] for i in WEIGHTS[:3]) or adapters.read_input(needs[_ADAPTERS:])
        ctx.save_for_backward(
            x if needs_x else None, qkv, attended, logs, summed1, stats1, up, summed2, stats2, cu,
            norm1_w, norm1_b, norm2_w, bias, *(weight.values for weight in turned), z_qkv, z_out, z_up, z_down,
            *seeds[:3],
        )  # fmt: skip
        ctx.longest, ctx.rates, ctx.scales, ctx.branches = longest, rates, scales, branches
        # Another forward pass before this backward pass may cast the weights with other scales.
        ctx.weight_scales = rows.clone().unbind()
        ctx.dtypes = [p.dtype for p in parameters]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x, qkv, attended, logs, summed1, stats1, up, summed2, stats2, cu,
         norm1_w, norm1_b, norm2_w, bias, *rest) = ctx.saved_tensors  # fmt: skip
        qkv_w, out_w, up_w, down_w = map(Float8, rest[:4], ctx.weight_scales)
        (z_qkv, z_out, z_up, z_down), seeds = rest[4:8], rest[8:]
        rates, scales, dtype = ctx.rates, ctx.scales, qkv.dtype
        needs = ctx.needs_input_grad
        wanted = needs[_FIRST:_ADAPTERS]
        on_qkv, on_out, on_up, on_down = ctx.branches

        def operand(like: Tensor, row: _Row) -> Float8:
            return Float8.like(like, GRADIENT, scales[row])

        d_down8, d_up8 = operand(grad, _Row.D_DOWN), operand(up, _Row.D_UP)
        d_hidden, d_down, sums2, _ = add_norm_backward(
            grad.contiguous(), summed2, stats2, norm2_w, rates.output, seeds[2], operand=d_down8
        )
        d_activated = scaled_product(d_down8, down_w, dtype)
        d_up, sums_up, d_down_w, dz_up = gelu_gradients(
            d_activated, up, d_down, on_up, on_down, z_up, z_down, wanted, ctx.dtypes, d_up8
        )
        del d_activated, d_down, d_down8
        more = scaled_product(d_up8, up_w, dtype)
        dz_up = on_up.through(d_up, z_up, more) if dz_up is None else dz_up
        d_out8 = operand(grad, _Row.D_OUT)
        d_x, d_out, sums1, hidden = add_norm_backward(
            d_hidden, summed1, stats1, norm1_w, rates.attention, seeds[1], norm1_b, more, d_out8
        )
        assert hidden is not None
        d_up_w = weight_gradient(d_up, hidden, ctx.dtypes[10]) if wanted[10] else None
        on_up.finish(hidden, dz_up)
        del d_up, d_up8, hidden, d_hidden, more
        d_out_w = weight_gradient(d_out, attended, ctx.dtypes[6]) if wanted[6] else None
        d_attended, d_qkv8 = scaled_product(d_out8, out_w, dtype), operand(qkv, _Row.D_QKV)
        on_out.finish(attended, on_out.through(d_out, z_out, d_attended))
        d_bias = None if bias is None else torch.empty_like(bias)
        attention_inputs = (attended, logs, cu, ctx.longest, rates.attention_weights, seeds[0])
        d_qkv, sums_qkv = attention_backward(
            d_attended, qkv, *attention_inputs, operand=d_qkv8, bias=bias, grad_bias=d_bias
        )
        d_qkv_w = weight_gradient(d_qkv, x, ctx.dtypes[0]) if any(wanted[i] for i in WEIGHTS[:3]) else None
        if needs[0]:
            d_x += scaled_product(d_qkv8, qkv_w, dtype)
        on_qkv.finish(x, on_qkv.through(d_qkv, z_qkv, d_x if needs[0] else None))
        d_weights = d_qkv_w, d_out_w, d_up_w, d_down_w
        gradients = parameter_gradients(ctx.dtypes, wanted, d_weights, (sums2, sums_up, sums1, sums_qkv))
        return d_x if needs[0] else None, *[None] * 5, d_bias, None, *gradients, *gradients_of(ctx.branches)


_FIRST = 8  # number of the first parameter among the function's inputs
_ADAPTERS = _FIRST + PARAMETERS  # number of the first tensor of an adapter
