"""GELU whose backward pass also recomputes its result and sums the gradient over tokens, all in one pass over memory.

Shapes: T tokens, F units of the feed-forward layer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["column_sums", "gelu_backward"]

_BACKWARD = {"ROWS": 8, "COLUMNS": 128, "num_warps": 4}  # of one tile
_SUMS = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}


def gelu_backward(grad_TF: Tensor, x_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the exact GELU, x · Φ(x), with Φ to float32's last bit or two.

    Args:
        grad_TF: Gradient of its result; contiguous, and overwritten with the first of the results.
        x_TF: Its input; contiguous.

    Returns:
        The gradient of x (T, F), GELU of x (T, F), and the sum over tokens of the gradient, float32 (F,), which is
        the gradient of a bias that was added to x.
    """
    result = torch.empty_like(x_TF)
    sums = _launch(_gelu_backward, _BACKWARD, x_TF, grad_TF, x_TF, result)
    return grad_TF, result, sums


def column_sums(x_TF: Tensor) -> Tensor:
    """Sum over tokens, float32 (F,), of a contiguous (T, F)."""
    return _launch(_column_sums, _SUMS, x_TF, x_TF)


def _launch(kernel: Any, tile: dict[str, int], x_TF: Tensor, *tensors: Tensor) -> Tensor:
    """Launch a kernel over tiles of (T, F) that sums each group of tokens in a program of its own; the whole sums."""
    tokens, features = x_TF.shape
    strips, groups = triton.cdiv(features, tile["COLUMNS"]), 3
    if x_TF.is_cuda:
        programs = 8 * torch.cuda.get_device_properties(x_TF.device).multi_processor_count
        groups = max(1, programs // strips)
    partial = torch.empty(groups, features, device=x_TF.device, dtype=torch.float32)
    kernel[(strips, groups)](*tensors, partial, tokens, features, **tile)
    return partial.sum(0)


@triton.jit
def normal_distribution(x, bell):
    """Φ(x), given exp(-x²/2), within 7e-8: a third fewer instructions a number than with erf and exp apart.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26, in the variable of Φ.
    """
    t = 1 / (1 + 0.2316418882663604 * tl.abs(x))
    series = t * (0.127414796 + t * (-0.142248368 + t * (0.710706871 + t * (-0.726576013 + t * 0.530702714))))
    return tl.where(x < 0, series * bell, 1 - series * bell)


@triton.jit
def _gelu_backward(
    grad_ptr, x_ptr, result_ptr, partial_ptr, tokens, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(group * ROWS, tokens, tl.num_programs(1) * ROWS):
        rows = start + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * features + columns[None, :]
        valid = (rows < tokens)[:, None] & (columns < features)[None, :]
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=valid, other=0.0).to(tl.float32)
        bell = tl.exp2(-0.7213475204444817 * x * x)  # exp(-x²/2), which both halves need
        below = normal_distribution(x, bell)
        tl.store(result_ptr + at, (x * below).to(result_ptr.dtype.element_ty), mask=valid)
        grad *= below + x * 0.3989422804014327 * bell
        tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=valid)
        total += grad
    tl.store(partial_ptr + group * features + columns, tl.sum(total, 0), mask=columns < features)


@triton.jit
def _column_sums(x_ptr, partial_ptr, tokens, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(group * ROWS, tokens, tl.num_programs(1) * ROWS):
        rows = start + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * features + columns[None, :]
        valid = (rows < tokens)[:, None] & (columns < features)[None, :]
        total += tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(partial_ptr + group * features + columns, tl.sum(total, 0), mask=columns < features)
