"""Dropout inside Triton kernels: seeds, and random bits as a hash of position and seed.

The backward pass recomputes the forward pass's mask from the seed, so no mask is stored. A number takes one
multiplication, compared with twenty for Philox, which would dominate the time of kernels bound by memory or matmuls.
Rows are hashed together with the seed, with the constants of Chris Wellons's hash prospector (lowbias32). Columns do
not depend on the seed and are only spread over 32 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw_seeds", "dropped", "kept", "load_seed", "mix_bits", "query_bits", "spread_bits", "threshold_of"]

_TILE = {"ROWS": 16, "COLUMNS": 256, "num_warps": 4}


def draw_seeds(count: int, device: torch.device, *, dropout: bool) -> tuple[Tensor, ...]:
    """Draw ``count`` seeds, int32 (1,), from torch's generator of the device; zeros, and no draw, without dropout."""
    if not dropout:
        return (torch.zeros(1, dtype=torch.int32, device=device),) * count
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=device).split(1)


def threshold_of(dropout: float) -> int:
    """Return the threshold below which a 32-bit random number means dropped."""
    return min(round(dropout * 2**32), 2**32 - 1)


def dropped(x_TC: Tensor, dropout: float, seed: Tensor, add_to: Tensor | None = None) -> Tensor:
    """Compute dropout(x) of a contiguous (T, C).

    Args:
        x_TC: The input. Dropout is linear, so the gradient of x is this function of the result's gradient.
        dropout: Dropout probability.
        seed: int32 (1,), on the device; the same seed gives the same mask.
        add_to: A contiguous (T, C) of the same dtype, to which the result is added in place; None for a new tensor.
    """
    tokens, columns = x_TC.shape
    out = torch.empty_like(x_TC) if add_to is None else add_to
    grid = (triton.cdiv(tokens, _TILE["ROWS"]), triton.cdiv(columns, _TILE["COLUMNS"]))
    _dropped[grid](
        x_TC, out, seed, tokens, columns, threshold_of(dropout), 1 / (1 - dropout), ADD=add_to is not None, **_TILE
    )
    return out


@triton.jit
def hash_bits(x):
    """Hash uint32 to uint32; every bit of the result depends on every bit of the input."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def spread_bits(columns):
    """Spread column indices over uint32. Without the shift, dropout of columns at a fixed distance would correlate."""
    x = (columns.to(tl.uint32) + 1) * 0x9E3779B9
    return x ^ (x >> 15)


@triton.jit
def mix_bits(rows, columns):
    """Return one uint32 for each pair of a hashed row and a spread column; use its high bits.

    The row is both multiplier and addend, because plain products are poor random numbers in even columns. A test checks
    the independence of pairs of rows, pairs of columns, columns at a fixed distance and quadruples of a mask.
    """
    return (rows | 1) * (columns ^ (rows >> 7))


@triton.jit
def kept(seed, row, columns, threshold):
    """Return whether dropout keeps each number of a row, or of rows (n, 1) at columns (1, m)."""
    rows = hash_bits((row + tl.zeros((1,), tl.int32)).to(tl.uint32) ^ seed)
    return mix_bits(rows, spread_bits(columns)) >= threshold


@triton.jit
def load_seed(seed_ptr):
    return tl.load(seed_ptr).to(tl.uint32, bitcast=True)


@triton.jit
def query_bits(seed_ptr, head, start, queries):
    """Return the hashed rows of :func:`mix_bits` for the queries of a head in the row that begins at ``start``."""
    seed = load_seed(seed_ptr)
    return hash_bits((start + queries).to(tl.uint32) ^ hash_bits(seed + head.to(tl.uint32)))


@triton.jit
def _dropped(
    x_ptr, out_ptr, seed_ptr, tokens, columns, threshold, scale,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (row < tokens)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    keep = kept(load_seed(seed_ptr), row[:, None], column[None, :], threshold)
    x = tl.where(keep, x * scale, 0.0)
    if ADD:
        x += tl.load(out_ptr + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=valid)
