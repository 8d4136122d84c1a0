"""Rotary position embeddings, applied in place to the queries and keys of a packed qkv projection.

Shapes: T tokens, A heads, D units per head.
Source: Su et al., arXiv 2104.09864; pairs are formed of a head's two halves, as in transformers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotate"]


def rotate(qkv: Tensor, cos_TD: Tensor, sin_TD: Tensor, heads: int, *, back: bool = False) -> None:
    """Rotate queries and keys by the angles of their tokens.

    Args:
        qkv: (T, 3·A·D), contiguous: the queries of all heads, then the keys, then the values. Queries and keys are
            overwritten.
        cos_TD, sin_TD: Cosines and sines of the angles, contiguous; both halves of a row are equal.
        heads: A. D must be a power of two.
        back: Rotate by the negative angles, which computes the gradient.
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    _rotate[(tokens,)](
        qkv, cos_TD, sin_TD, HIDDEN=hidden, HEADS=2 * heads, SIZE=size, BACK=back,
        BLOCK=triton.next_power_of_2(2 * heads), num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate(
    qkv_ptr, cos_ptr, sin_ptr,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one token. Its queries and keys are adjacent in memory and handled as twice the number of heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK)
    units = tl.arange(0, SIZE // 2)
    cos = tl.load(cos_ptr + token * SIZE + units).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * SIZE + units).to(tl.float32)[None, :]
    if BACK:
        sin = -sin
    at = qkv_ptr + token * (3 * HIDDEN) + heads[:, None] * SIZE + units[None, :]
    valid = (heads < HEADS)[:, None]
    first = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(at + SIZE // 2, mask=valid, other=0.0).to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask=valid)
    tl.store(at + SIZE // 2, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask=valid)
