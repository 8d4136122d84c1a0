"""Dropout, residual addition and LayerNorm in one pass over memory, forward and backward.

Behind a sublayer, as in BERT (``add_norm``), results have the inputs' dtype. Before the next one, as in a pre-norm
Transformer (``pre_norm``), the sum is the float32 residual stream, and its norm is the sublayer's input.

Shapes: T tokens, H hidden units. Sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.dropout import kept, load_seed, threshold_of
from composer_speedups.kernels.float8 import Float8, note_magnitude, scale_of, settle
from composer_speedups.kernels.sums import multiprocessors

__all__ = ["add_norm_backward", "add_norm_forward", "pre_norm_backward", "pre_norm_forward"]

# Rows in registers per program of the backward kernels, and their warps per multiprocessor. More rows would reduce the
# number of warps, and a single warp does not have enough registers for its sums over tokens.
_BACKWARD = {"ROWS": 2, "warps": 16}


def add_norm_forward(
    x_TH: Tensor,
    residual_TH: Tensor,
    weight_H: Tensor,
    bias_H: Tensor,
    eps: float,
    dropout: float,
    seed: Tensor,
    operand: Float8 | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute LayerNorm(dropout(x) + residual).

    Args:
        x_TH, residual_TH: Contiguous, of the same dtype. x is overwritten with the sum before the norm.
        weight_H, bias_H: Parameters of the LayerNorm.
        eps: Added to the variance.
        dropout: Dropout probability of x.
        seed: int32 (1,), on the device; the same seed gives the same mask.
        operand: Also receives the result in 8 bits, settled.

    Returns:
        The result (T, H), the sum before the norm (T, H, in x's memory), and its mean and inverse standard deviation,
        float32 (2, T).
    """
    tokens, hidden = x_TH.shape
    out = torch.empty_like(x_TH)
    statistics = torch.empty(2, tokens, device=x_TH.device, dtype=torch.float32)
    block = triton.next_power_of_2(hidden)
    _norm_forward[(tokens,)](
        residual_TH, x_TH, x_TH, weight_H, bias_H, out, statistics, seed,
        *(operand or (out, seed)), tokens, hidden, eps, threshold_of(dropout), 1 / (1 - dropout), SUBLAYER=True,
        BIAS=True, DROPOUT=dropout > 0, FLOAT8=operand is not None, BLOCK=block,
        num_warps=max(1, min(8, block // 1024)),
    )  # fmt: skip
    if operand is not None:
        settle(operand, out)
    return out, x_TH, statistics


def add_norm_backward(
    grad_TH: Tensor,
    summed_TH: Tensor,
    statistics: Tensor,
    weight_H: Tensor,
    dropout: float,
    seed: Tensor,
    bias_H: Tensor | None = None,
    more_TH: Tensor | None = None,
    operand: Float8 | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of :func:`add_norm_forward` and optionally recompute its result.

    Args:
        grad_TH: Gradient of the result; contiguous.
        summed_TH, statistics: As returned by the forward pass.
        weight_H: Weight of the LayerNorm.
        dropout, seed: As in the forward pass.
        bias_H: Bias of the LayerNorm, to recompute the forward pass's result bit for bit; None skips that.
        more_TH: A second gradient of the result, added to ``grad_TH``.
        operand: Also receives the gradient of x in 8 bits, settled.

    Returns:
        The gradient of the residual (T, H); the gradient of x (T, H; the same tensor without dropout); partial sums,
        float32 (P, 3, H), for :func:`~.sums.totals`: their totals are the gradients of the weight, of the bias, and of
        a bias that was added to x before (the sum over tokens of x's gradient); and the forward pass's result (T, H),
        or None without ``bias_H``.
    """
    tokens, hidden = grad_TH.shape
    grad_residual = torch.empty_like(grad_TH)
    grad_x = torch.empty_like(grad_TH) if dropout > 0 else grad_residual
    again = None if bias_H is None else torch.empty_like(grad_TH)
    block = triton.next_power_of_2(hidden)
    warps = max(1, min(8, block // 256))
    programs = _backward_programs(grad_TH, warps)
    partial = torch.empty(programs, 3, hidden, device=grad_TH.device, dtype=torch.float32)
    _norm_backward[(programs,)](
        grad_TH, summed_TH, statistics, weight_H, weight_H if bias_H is None else bias_H,
        grad_residual, grad_x, grad_x if again is None else again, partial, seed,
        grad_TH if more_TH is None else more_TH, grad_TH, *(operand or (grad_x, seed)),
        tokens, hidden, threshold_of(dropout), 1 / (1 - dropout),
        GRAD_X=dropout > 0, DROPOUT=dropout > 0, AGAIN=again is not None, MORE=more_TH is not None, STREAM=False,
        FLOAT8=operand is not None, SUMS=3, ROWS=_BACKWARD["ROWS"], BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if operand is not None:
        settle(operand, grad_x)
    return grad_residual, grad_x, partial, again


def _backward_programs(grad_TH: Tensor, warps: int) -> int:
    """Return how many programs of ``warps`` warps compute a gradient, each of which writes one row of partial sums: as
    many as the device runs at a time, if there are enough tokens."""
    at_a_time = multiprocessors(grad_TH) * (_BACKWARD["warps"] // warps) if grad_TH.is_cuda else 4
    return min(triton.cdiv(len(grad_TH), _BACKWARD["ROWS"]), at_a_time)


@triton.jit
def standardize(x, valid, hidden, eps):
    """Return a row minus its mean (0 where it is not valid), the mean, and the inverse standard deviation."""
    mean = tl.sum(x, 0) / hidden
    centred = tl.where(valid, x - mean, 0.0)
    return centred, mean, 1 / tl.sqrt(tl.sum(centred * centred, 0) / hidden + eps)


@triton.jit
def _norm_forward(
    residual_ptr, x_ptr, summed_ptr, weight_ptr, bias_ptr, out_ptr, statistics_ptr, seed_ptr, out8_ptr, scales_ptr,
    tokens, hidden, eps, threshold, scale,
    SUBLAYER: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    valid = columns < hidden
    at = columns.to(tl.int64) + row * hidden
    summed = tl.load(residual_ptr + at, mask=valid, other=0.0).to(tl.float32)
    if SUBLAYER:
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        if DROPOUT:
            seed = load_seed(seed_ptr)
            x = tl.where(kept(seed, row, columns, threshold), x * scale, 0.0)
        x = (x + summed).to(summed_ptr.dtype.element_ty)  # rounded, as the backward pass reads it
        tl.store(summed_ptr + at, x, mask=valid)
        summed = x.to(tl.float32)
    centred, mean, inverse = standardize(summed, valid, hidden, eps)
    out = centred * inverse * tl.load(weight_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=valid)
    if FLOAT8:
        out = out.to(tl.float32)
        tl.store(out8_ptr + at, (out * scale_of(scales_ptr)).to(out8_ptr.dtype.element_ty), mask=valid)
        note_magnitude(scales_ptr, row, tl.max(tl.abs(out), 0))
    tl.store(statistics_ptr + row, mean)
    tl.store(statistics_ptr + tokens + row, inverse)


@triton.jit
def _norm_backward(
    grad_ptr, summed_ptr, statistics_ptr, weight_ptr, bias_ptr,
    grad_residual_ptr, grad_x_ptr, again_ptr, partial_ptr, seed_ptr, more_ptr, stream_ptr, out8_ptr, scales_ptr,
    tokens, hidden, threshold, scale,
    GRAD_X: tl.constexpr, DROPOUT: tl.constexpr, AGAIN: tl.constexpr, MORE: tl.constexpr, STREAM: tl.constexpr,
    FLOAT8: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norm has a bias if there are two sums over tokens or more; the third is that of x's gradient."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if AGAIN and SUMS > 1:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        seed = load_seed(seed_ptr)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    sum_x = tl.zeros((BLOCK,), tl.float32)
    if FLOAT8:
        scale8 = scale_of(scales_ptr)
        largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(program * ROWS, tokens, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        real = rows < tokens
        valid = real[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None] * hidden + columns[None, :]
        if FLOAT8:
            # Limit a thread to 8 adjacent numbers. With 16, the two rows would be in different warps, and every sum
            # over rows would go through shared memory.
            at = tl.max_contiguous(at, [1, 8])
        grad = tl.load(grad_ptr + at, mask=valid, other=0.0).to(tl.float32)
        if MORE:
            grad += tl.load(more_ptr + at, mask=valid, other=0.0).to(tl.float32)
        summed = tl.load(summed_ptr + at, mask=valid, other=0.0).to(tl.float32)
        mean = tl.load(statistics_ptr + rows, mask=real, other=0.0)
        inverse = tl.load(statistics_ptr + tokens + rows, mask=real, other=0.0)
        normed = (summed - mean[:, None]) * inverse[:, None]  # multiplied by zeros past the end of a row
        if AGAIN:
            again = normed * weight[None, :]
            if SUMS > 1:
                again += bias[None, :]
            tl.store(again_ptr + at, again.to(again_ptr.dtype.element_ty), mask=valid)
        sum_weight += tl.sum(grad * normed, 0)
        sum_bias += tl.sum(grad, 0)
        weighted = grad * weight[None, :]
        along = tl.sum(weighted * normed, 1) / hidden
        across = tl.sum(weighted, 1) / hidden
        grad_sum = (weighted - normed * along[:, None] - across[:, None]) * inverse[:, None]
        if STREAM:
            grad_sum += tl.load(stream_ptr + at, mask=valid, other=0.0)
        tl.store(grad_residual_ptr + at, grad_sum.to(grad_residual_ptr.dtype.element_ty), mask=valid)
        if DROPOUT:
            keep = kept(seed, rows[:, None], columns[None, :], threshold)
            grad_sum = tl.where(keep, grad_sum * scale, 0.0)
        if GRAD_X:
            tl.store(grad_x_ptr + at, grad_sum.to(grad_x_ptr.dtype.element_ty), mask=valid)
        if FLOAT8:
            grad_x = grad_sum.to(grad_x_ptr.dtype.element_ty).to(tl.float32)
            tl.store(out8_ptr + at, (grad_x * scale8).to(out8_ptr.dtype.element_ty), mask=valid)
            largest = tl.maximum(largest, tl.max(tl.abs(grad_x), 0))
        sum_x += tl.sum(grad_sum, 0)  # rows past the end are 0, columns past the end are not stored
    if FLOAT8:
        note_magnitude(scales_ptr, program, tl.max(tl.where(inside, largest, 0.0), 0))
    at = partial_ptr + program * SUMS * hidden + columns
    tl.store(at, sum_weight, mask=inside)
    if SUMS > 1:
        tl.store(at + hidden, sum_bias, mask=inside)
    if SUMS > 2:
        tl.store(at + 2 * hidden, sum_x, mask=inside)


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
    _norm_forward[(tokens,)](
        residual_TH, residual_TH if sublayer_TH is None else sublayer_TH, summed, weight_H,
        weight_H if bias_H is None else bias_H, out, statistics, seed, out, seed,
        tokens, hidden, eps, threshold_of(dropout), 1 / (1 - dropout), SUBLAYER=sublayer_TH is not None,
        BIAS=bias_H is not None, DROPOUT=dropout > 0, FLOAT8=False, BLOCK=block,
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
    programs = _backward_programs(grad_TH, warps)
    sums = (hidden,) if bias_H is None else (2, hidden)
    partial = torch.empty(programs, *sums, device=grad_TH.device, dtype=torch.float32)
    _norm_backward[(programs,)](
        grad_TH, summed_TH, statistics, weight_H, weight_H if bias_H is None else bias_H,
        grad_residual, again if grad_sublayer is None else grad_sublayer, again, partial, seed,
        grad_TH, grad_summed_TH, again, seed, tokens, hidden, threshold_of(dropout), 1 / (1 - dropout),
        GRAD_X=sublayer, DROPOUT=dropout > 0, AGAIN=True, MORE=False, STREAM=True,
        FLOAT8=False, SUMS=1 if bias_H is None else 2, ROWS=_BACKWARD["ROWS"], BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return grad_residual, grad_sublayer, partial.sum(0), again
