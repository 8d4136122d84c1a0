"""Reproducible sums over tokens: a first kernel writes rows of partial sums, and a second kernel adds these rows.

Atomic additions would need one kernel only, but their order and therefore their rounding differ from run to run.

Shapes: T tokens, C columns, P rows of partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MAX_TENSORS", "partial_sums", "totals"]

_SUMS = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
_TOTALS = {"ROWS": 256, "COLUMNS": 32, "num_warps": 8}
MAX_TENSORS = 4  # summed by one launch of _totals


def multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of a tensor's GPU."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def strips_and_groups(x_TC: Tensor, width: int, programs: int = 8) -> tuple[int, int]:
    """Return the grid of a kernel that sums over tokens: strips of ``width`` columns, and groups of tokens per strip,
    each of which writes one row of partial sums; together at most about ``programs`` programs per multiprocessor."""
    strips = triton.cdiv(x_TC.shape[1], width)
    return strips, max(1, programs * multiprocessors(x_TC) // strips) if x_TC.is_cuda else 3


def partial_sums(x_TC: Tensor) -> Tensor:
    """Return partial sums over the tokens of a contiguous tensor, float32 (P, C)."""
    tokens, columns = x_TC.shape
    strips, groups = strips_and_groups(x_TC, _SUMS["COLUMNS"])
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
    unused = MAX_TENSORS - len(partials)
    pointers = [*partials, *[out] * unused]
    rows = [len(partial) for partial in partials] + [0] * unused
    strips = sum(triton.cdiv(width, _TOTALS["COLUMNS"]) for width in widths)
    _totals[(strips,)](*pointers, out, *rows, *widths, *[0] * unused, **_TOTALS)
    return [total.view(partial.shape[1:]) for total, partial in zip(out.split(widths), partials, strict=True)]


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
    first_width, second_width, third_width, fourth_width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0)
    second_strip = tl.cdiv(first_width, COLUMNS)  # strips of COLUMNS columns are numbered tensor after tensor
    third_strip = second_strip + tl.cdiv(second_width, COLUMNS)
    fourth_strip = third_strip + tl.cdiv(third_width, COLUMNS)
    if strip < second_strip:
        _total(first_ptr, out_ptr, strip, first_rows, first_width, ROWS, COLUMNS)
    elif strip < third_strip:
        _total(second_ptr, out_ptr + first_width, strip - second_strip, second_rows, second_width, ROWS, COLUMNS)
    elif strip < fourth_strip:
        out = out_ptr + first_width + second_width
        _total(third_ptr, out, strip - third_strip, third_rows, third_width, ROWS, COLUMNS)
    else:
        out = out_ptr + first_width + second_width + third_width
        _total(fourth_ptr, out, strip - fourth_strip, fourth_rows, fourth_width, ROWS, COLUMNS)


@triton.jit
def _total(partial_ptr, out_ptr, strip, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = strip * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        valid = (row < rows)[:, None] & (columns < width)[None, :]
        total += tl.load(partial_ptr + row[:, None] * width + columns[None, :], mask=valid, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0), mask=columns < width)
