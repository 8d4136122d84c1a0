"""Dropout, residual addition and LayerNorm before a sublayer, in one pass over memory, forward and backward.

As in a pre-norm Transformer, the sum is the float32 residual stream, and its norm is the next sublayer's input.

Shapes: T tokens, H hidden units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.dropout import kept, load_seed, threshold_of
from composer_speedups.kernels.norm import BACKWARD, backward_programs, standardize

__all__ = ["pre_norm_backward", "pre_norm_forward"]


def pre_norm_forward(
    residual_TH: Tensor,
    sublayer_TH: Tensor | None,
    weight_H: Tensor,
    eps: float,
    dropout: float,
    seed: Tensor,
    dtype: torch.dtype,
    bias_H: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute LayerNorm(residual + dropout(sublayer)).

    Args:
        residual_TH: float32, contiguous.
        sublayer_TH: Result of the preceding sublayer, contiguous, in any dtype; None if there is none.
        weight_H: Weight of the LayerNorm.
        eps: Added to the variance.
        dropout: Dropout probability of ``sublayer_TH``.
        seed: int32 (1,), on the device; the same seed gives the same mask.
        dtype: Dtype of the result.
        bias_H: Bias of the LayerNorm, or None.

    Returns:
        The result (T, H), the sum before the norm, float32 (T, H; ``residual_TH`` itself without a sublayer), and its
        mean and inverse standard deviation, float32 (2, T).
    """
    tokens, hidden = residual_TH.shape
    out = torch.empty(tokens, hidden, device=residual_TH.device, dtype=dtype)
    summed = residual_TH if sublayer_TH is None else torch.empty_like(residual_TH)
    statistics = torch.empty(2, tokens, device=residual_TH.device, dtype=torch.float32)
    block = triton.next_power_of_2(hidden)
    _pre_norm_forward[(tokens,)](
        residual_TH, residual_TH if sublayer_TH is None else sublayer_TH, summed, weight_H,
        weight_H if bias_H is None else bias_H, out, statistics, seed,
        tokens, hidden, eps, threshold_of(dropout), 1 / (1 - dropout),
        SUBLAYER=sublayer_TH is not None, BIAS=bias_H is not None, DROPOUT=dropout > 0, BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return out, summed, statistics


def pre_norm_backward(
    grad_TH: Tensor,
    grad_summed_TH: Tensor,
    summed_TH: Tensor,
    statistics: Tensor,
    weight_H: Tensor,
    dropout: float,
    seed: Tensor,
    bias_H: Tensor | None = None,
    *,
    sublayer: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute the gradients of :func:`pre_norm_forward`, and recompute its result bit for bit.

    Args:
        grad_TH: Gradient of the result; contiguous.
        grad_summed_TH: Gradient of the sum from its other uses, float32; contiguous.
        summed_TH, statistics: As returned by the forward pass.
        weight_H, dropout, seed, bias_H: As in the forward pass.
        sublayer: Whether the forward pass had ``sublayer_TH``.

    Returns:
        The gradient of the residual, float32 (T, H); of ``sublayer_TH`` (T, H, in ``grad_TH``'s dtype; None without a
        sublayer); of the weight, float32 (H,), or with a bias of weight and bias, (2, H); and the forward pass's result
        (T, H, in ``grad_TH``'s dtype).
    """
    tokens, hidden = grad_TH.shape
    grad_residual, again = torch.empty_like(grad_summed_TH), torch.empty_like(grad_TH)
    grad_sublayer = torch.empty_like(grad_TH) if sublayer else None
    block = triton.next_power_of_2(hidden)
    warps = max(1, min(8, block // 256))
    programs = backward_programs(grad_TH, warps)
    sums = (hidden,) if bias_H is None else (2, hidden)
    partial = torch.empty(programs, *sums, device=grad_TH.device, dtype=torch.float32)
    _pre_norm_backward[(programs,)](
        grad_TH, grad_summed_TH, summed_TH, statistics, weight_H, weight_H if bias_H is None else bias_H,
        grad_residual, again if grad_sublayer is None else grad_sublayer, again, partial, seed,
        tokens, hidden, threshold_of(dropout), 1 / (1 - dropout),
        SUBLAYER=sublayer, BIAS=bias_H is not None, DROPOUT=dropout > 0, ROWS=BACKWARD["ROWS"], BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return grad_residual, grad_sublayer, partial.sum(0), again


@triton.jit
def _pre_norm_forward(
    residual_ptr, sublayer_ptr, summed_ptr, weight_ptr, bias_ptr, out_ptr, statistics_ptr, seed_ptr,
    tokens, hidden, eps, threshold, scale,
    SUBLAYER: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    valid = columns < hidden
    at = columns.to(tl.int64) + row * hidden
    summed = tl.load(residual_ptr + at, mask=valid, other=0.0)
    if SUBLAYER:
        sublayer = tl.load(sublayer_ptr + at, mask=valid, other=0.0).to(tl.float32)
        if DROPOUT:
            seed = load_seed(seed_ptr)
            sublayer = tl.where(kept(seed, row, columns, threshold), sublayer * scale, 0.0)
        summed += sublayer
        tl.store(summed_ptr + at, summed, mask=valid)
    centred, mean, inverse = standardize(summed, valid, hidden, eps)
    weight = tl.load(weight_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    out = centred * inverse * weight
    if BIAS:
        out += tl.load(bias_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=valid)
    tl.store(statistics_ptr + row, mean)
    tl.store(statistics_ptr + tokens + row, inverse)


@triton.jit
def _pre_norm_backward(
    grad_ptr, grad_summed_ptr, summed_ptr, statistics_ptr, weight_ptr, bias_ptr,
    grad_residual_ptr, grad_sublayer_ptr, again_ptr, partial_ptr, seed_ptr,
    tokens, hidden, threshold, scale,
    SUBLAYER: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        seed = load_seed(seed_ptr)
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        sum_bias = tl.zeros((BLOCK,), tl.float32)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    for first in range(program * ROWS, tokens, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        real = rows < tokens
        valid = real[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None] * hidden + columns[None, :]
        grad = tl.load(grad_ptr + at, mask=valid, other=0.0).to(tl.float32)
        summed = tl.load(summed_ptr + at, mask=valid, other=0.0)
        mean = tl.load(statistics_ptr + rows, mask=real, other=0.0)
        inverse = tl.load(statistics_ptr + tokens + rows, mask=real, other=0.0)
        normed = (summed - mean[:, None]) * inverse[:, None]  # multiplied by zeros past the end of a row
        weighted = grad * weight[None, :]
        again = normed * weight[None, :]
        if BIAS:
            again += bias[None, :]
            sum_bias += tl.sum(grad, 0)
        tl.store(again_ptr + at, again.to(again_ptr.dtype.element_ty), mask=valid)
        sum_weight += tl.sum(grad * normed, 0)
        along = tl.sum(weighted * normed, 1) / hidden
        across = tl.sum(weighted, 1) / hidden
        grad_sum = (weighted - normed * along[:, None] - across[:, None]) * inverse[:, None]
        grad_sum += tl.load(grad_summed_ptr + at, mask=valid, other=0.0)
        tl.store(grad_residual_ptr + at, grad_sum, mask=valid)
        if SUBLAYER:
            if DROPOUT:
                grad_sum = tl.where(kept(seed, rows[:, None], columns[None, :], threshold), grad_sum * scale, 0.0)
            tl.store(grad_sublayer_ptr + at, grad_sum.to(grad_sublayer_ptr.dtype.element_ty), mask=valid)
    if BIAS:
        tl.store(partial_ptr + program * 2 * hidden + columns, sum_weight, mask=inside)
        tl.store(partial_ptr + (program * 2 + 1) * hidden + columns, sum_bias, mask=inside)
    else:
        tl.store(partial_ptr + program * hidden + columns, sum_weight, mask=inside)
