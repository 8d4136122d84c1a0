"""GELU with a backward pass that also recomputes its result and sums the gradient over tokens, in one pass over memory.

The kernels can write 8-bit operands of matmuls; see :mod:`.float8`. GeGLU, with dropout, is the GELU of a projection's
first half times its second half.

Shapes: T tokens, F units of the feed-forward layer.
Source: Shazeer, arXiv 2002.05202, for GeGLU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.dropout import kept, load_seed, threshold_of
from composer_speedups.kernels.float8 import (
    ACTIVATION,
    Float8,
    note_magnitude,
    noted_magnitude,
    scale_of,
    settle,
    settled_scale,
    targets_of,
)
from composer_speedups.kernels.sums import multiprocessors, strips_and_groups

__all__ = ["geglu_backward", "geglu_forward", "gelu_backward", "gelu_float8", "gelu_forward"]

_FORWARD = {"BLOCK": 8192, "num_warps": 8}
_FORWARD_FLOAT8 = {"BLOCK": 4096, "num_warps": 8}
_BACKWARD = {"ROWS": 8, "COLUMNS": 128, "num_warps": 4}  # per tile
_GEGLU_COLUMNS = 512


def gelu_forward(x_TF: Tensor) -> Tensor:
    """Compute the exact GELU of a contiguous (T, F), x · Φ(x), in its dtype.

    Φ is accurate to the last bit or two of float32.
    """
    result = torch.empty_like(x_TF)
    numbers = x_TF.numel()
    _gelu[(triton.cdiv(numbers, _FORWARD["BLOCK"]),)](x_TF, result, numbers, **_FORWARD)
    return result


def gelu_float8(x_TF: Tensor, scales: Tensor) -> Float8:
    """Compute the exact GELU of a contiguous (T, F) in e4m3 only, as a settled operand.

    ``scales`` is the operand's row of :func:`~.float8.new_scales`.
    """
    operand = Float8.like(x_TF, ACTIVATION, scales)
    programs = 8 * multiprocessors(x_TF) if x_TF.is_cuda else 4
    for again in (False, True):
        _gelu_float8[(programs,)](
            x_TF, operand.values, scales, x_TF.numel(), *targets_of(ACTIVATION), AGAIN=again, **_FORWARD_FLOAT8
        )
    return operand


def gelu_backward(grad_TF: Tensor, x_TF: Tensor, operand: Float8 | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of :func:`gelu_forward`, and recompute its result.

    Args:
        grad_TF: Gradient of GELU's result; contiguous. Overwritten with the gradient of x.
        x_TF: GELU's input; contiguous.
        operand: Also receives the gradient of x in 8 bits, settled.

    Returns:
        The gradient of x (T, F), GELU of x (T, F), and partial sums of the gradient over tokens, float32 (P, F), for
        :func:`~.sums.totals`: their total is the gradient of a bias that was added to x.
    """
    tokens, features = x_TF.shape
    result = torch.empty_like(x_TF)
    strips, groups = strips_and_groups(x_TF, _BACKWARD["COLUMNS"])
    partial = torch.empty(groups, features, device=x_TF.device, dtype=torch.float32)
    _gelu_backward[(strips, groups)](
        grad_TF, x_TF, result, *(operand or (x_TF, x_TF)), partial, tokens, features, FLOAT8=operand is not None,
        **_BACKWARD,
    )  # fmt: skip
    if operand is not None:
        settle(operand, grad_TF)
    return grad_TF, result, partial


@triton.jit
def normal_distribution(x, bell):
    """Return Φ(x), given exp(-x²/2), within 7e-8. This takes a third fewer instructions than separate erf and exp.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26, in the variable of Φ.
    """
    t = 1 / (1 + 0.2316418882663604 * tl.abs(x))
    series = t * (0.127414796 + t * (-0.142248368 + t * (0.710706871 + t * (-0.726576013 + t * 0.530702714))))
    return tl.where(x < 0, series * bell, 1 - series * bell)


@triton.jit
def _gelu(x_ptr, out_ptr, numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numbers, other=0.0).to(tl.float32)
    x *= normal_distribution(x, tl.exp2(-0.7213475204444817 * x * x))  # exp(-x²/2)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < numbers)


@triton.jit
def _gelu_float8(x_ptr, out_ptr, scales_ptr, numbers, most, target, least, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    scale = scale_of(scales_ptr)
    cast = True
    if AGAIN:
        before = scale
        scale = settled_scale(scales_ptr, noted_magnitude(scales_ptr), most, target, least, program == 0)
        cast = scale != before
    if cast:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(program * BLOCK, numbers, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < numbers, other=0.0).to(tl.float32)
            x *= normal_distribution(x, tl.exp2(-0.7213475204444817 * x * x))
            tl.store(out_ptr + at, (x * scale).to(out_ptr.dtype.element_ty), mask=at < numbers)
            largest = tl.maximum(largest, tl.abs(x))
        if not AGAIN:
            note_magnitude(scales_ptr, program, tl.max(largest, 0))


@triton.jit
def _gelu_backward(
    grad_ptr, x_ptr, result_ptr, out8_ptr, scales_ptr, partial_ptr, tokens, features,
    FLOAT8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if FLOAT8:
        scale = scale_of(scales_ptr)
        largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(group * ROWS, tokens, tl.num_programs(1) * ROWS):
        rows = start + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * features + columns[None, :]
        valid = (rows < tokens)[:, None] & (columns < features)[None, :]
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=valid, other=0.0).to(tl.float32)
        bell = tl.exp2(-0.7213475204444817 * x * x)  # exp(-x²/2), used for Φ and its derivative
        below = normal_distribution(x, bell)
        tl.store(result_ptr + at, (x * below).to(result_ptr.dtype.element_ty), mask=valid)
        grad *= below + x * 0.3989422804014327 * bell
        rounded = grad.to(grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + at, rounded, mask=valid)
        total += grad
        if FLOAT8:
            rounded = rounded.to(tl.float32)
            tl.store(out8_ptr + at, (rounded * scale).to(out8_ptr.dtype.element_ty), mask=valid)
            largest = tl.maximum(largest, tl.abs(rounded))
    if FLOAT8:
        note_magnitude(scales_ptr, group * tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(largest, 1), 0))
    tl.store(partial_ptr + group * features + columns, tl.sum(total, 0), mask=columns < features)


def geglu_forward(x_TF2: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """Compute dropout(GELU(first half) · second half), (T, F), with the exact GELU.

    Args:
        x_TF2: (T, 2·F), contiguous.
        dropout: Dropout probability of the result.
        seed: int32 (1,), on the device; the same seed gives the same mask.
    """
    tokens, inner = x_TF2.shape[0], x_TF2.shape[1] // 2
    out = torch.empty(tokens, inner, device=x_TF2.device, dtype=x_TF2.dtype)
    _geglu_forward[(tokens, triton.cdiv(inner, _GEGLU_COLUMNS))](
        x_TF2, out, seed, inner, threshold_of(dropout), 1 / (1 - dropout),
        DROPOUT=dropout > 0, COLUMNS=_GEGLU_COLUMNS, num_warps=2,
    )  # fmt: skip
    return out


def geglu_backward(grad_TF: Tensor, x_TF2: Tensor, dropout: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of :func:`geglu_forward`'s input, (T, 2·F), and its recomputed result, (T, F).

    Args:
        grad_TF: Gradient of the result; contiguous. Overwritten with the recomputed result.
        x_TF2, dropout, seed: As in the forward pass.
    """
    tokens, inner = grad_TF.shape
    grad_x = torch.empty_like(x_TF2)
    _geglu_backward[(tokens, triton.cdiv(inner, _GEGLU_COLUMNS))](
        grad_TF, x_TF2, grad_x, seed, inner, threshold_of(dropout), 1 / (1 - dropout),
        DROPOUT=dropout > 0, COLUMNS=_GEGLU_COLUMNS, num_warps=2,
    )  # fmt: skip
    return grad_x, grad_TF


@triton.jit
def _geglu_forward(x_ptr, out_ptr, seed_ptr, inner, threshold, scale, DROPOUT: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = columns < inner
    at = row.to(tl.int64) * 2 * inner + columns
    x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + at + inner, mask=valid, other=0.0).to(tl.float32)
    out = x * normal_distribution(x, tl.exp2(-0.7213475204444817 * x * x)) * gate
    if DROPOUT:
        seed = load_seed(seed_ptr)
        out = tl.where(kept(seed, row, columns, threshold), out * scale, 0.0)
    tl.store(out_ptr + row.to(tl.int64) * inner + columns, out.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _geglu_backward(
    grad_ptr, x_ptr, grad_x_ptr, seed_ptr, inner, threshold, scale, DROPOUT: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = columns < inner
    at = row.to(tl.int64) * 2 * inner + columns
    out_at = row.to(tl.int64) * inner + columns
    x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + at + inner, mask=valid, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + out_at, mask=valid, other=0.0).to(tl.float32)
    bell = tl.exp2(-0.7213475204444817 * x * x)  # exp(-x²/2)
    below = normal_distribution(x, bell)
    activated = x * below
    result = activated * gate
    if DROPOUT:
        seed = load_seed(seed_ptr)
        keep = kept(seed, row, columns, threshold)
        grad = tl.where(keep, grad * scale, 0.0)
        result = tl.where(keep, result * scale, 0.0)
    tl.store(grad_ptr + out_at, result.to(grad_ptr.dtype.element_ty), mask=valid)
    grad_x = grad * gate * (below + x * 0.3989422804014327 * bell)
    tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=valid)
    tl.store(grad_x_ptr + at + inner, (grad * activated).to(grad_x_ptr.dtype.element_ty), mask=valid)
