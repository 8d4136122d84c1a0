"""Sums over tokens: of a tensor, and the totals of partial sums that several kernels left, in one launch.

Kernels that sum over tokens write one row of partial sums per program, because atomic additions would have no fixed
order.

Shapes: T tokens, C columns, P rows of partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["partial_sums", "totals"]

_SUMS = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
_TOTALS = {"ROWS": 128, "COLUMNS": 32, "num_warps": 4}
_MOST = 4  # partial sums per launch


def partial_sums(x_TC: Tensor) -> Tensor:
    """Return partial sums over tokens, float32 (P, C), of a contiguous tensor."""
    tokens, columns = x_TC.shape
    strips, groups = triton.cdiv(columns, _SUMS["COLUMNS"]), 3
    if x_TC.is_cuda:
        groups = max(1, 8 * torch.cuda.get_device_properties(x_TC.device).multi_processor_count // strips)
    partial = torch.empty(groups, columns, device=x_TC.device, dtype=torch.float32)
    _column_sums[(strips, groups)](x_TC, partial, tokens, columns, **_SUMS)
    return partial


def totals(partials: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of each tensor over its first dimension.

    Args:
        partials: Up to four contiguous float32 tensors, each (P, …) with its own P and further dimensions.
    """
    widths = [partial[0].numel() for partial in partials]
    out = torch.empty(sum(widths), device=partials[0].device, dtype=torch.float32)
    unused = _MOST - len(partials)
    pointers, columns = [*partials, *[out] * unused], [*widths, *[0] * unused]
    rows = [len(partial) for partial in partials] + [0] * unused
    strips = sum(triton.cdiv(width, _TOTALS["COLUMNS"]) for width in widths)
    _totals[(strips,)](*pointers, out, *rows, *columns, **_TOTALS)
    return [total.view(each.shape[1:]) for total, each in zip(out.split(widths), partials, strict=True)]


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


@triton.jit(do_not_specialize=["first_rows", "second_rows", "third_rows", "fourth_rows"])
def _totals(
    first_ptr, second_ptr, third_ptr, fourth_ptr, out_ptr, first_rows, second_rows, third_rows, fourth_rows,
    first, second, third, fourth, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0)
    one, two, three = tl.cdiv(first, COLUMNS), tl.cdiv(second, COLUMNS), tl.cdiv(third, COLUMNS)
    if strip < one:
        _total(first_ptr, out_ptr, strip, first_rows, first, ROWS, COLUMNS)
    elif strip < one + two:
        _total(second_ptr, out_ptr + first, strip - one, second_rows, second, ROWS, COLUMNS)
    elif strip < one + two + three:
        _total(third_ptr, out_ptr + first + second, strip - one - two, third_rows, third, ROWS, COLUMNS)
    else:
        at = out_ptr + first + second + third
        _total(fourth_ptr, at, strip - one - two - three, fourth_rows, fourth, ROWS, COLUMNS)


@triton.jit
def _total(partial_ptr, out_ptr, strip, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = strip * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        valid = (row < rows)[:, None] & (columns < width)[None, :]
        total += tl.load(partial_ptr + row[:, None] * width + columns[None, :], mask=valid, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0), mask=columns < width)
