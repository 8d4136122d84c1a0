"""Attention of each row's first token over packed keys and values, with dropout, forward and backward.

A last layer whose head reads only first tokens has one query per row. A program computes one head of one row in a
single pass over its keys, so the kernels take about as long as reading the keys and values, and writing their
gradients.

Shapes: T tokens, A heads, D units per head, R rows, of which the first B have a query. Sums are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.common import FirstDerivative
from composer_speedups.kernels.dropout import draw_seeds, mix_bits, query_bits, spread_bits, threshold_of

__all__ = ["first_token_attention", "first_token_backward", "first_token_forward"]

_BLOCK = {"COLUMNS": 64, "num_warps": 4}  # keys per block


def first_token_attention(
    query: Tensor, key_value: Tensor, cu_seqlens: Tensor, heads: int, dropout: float, window: int | None = None
) -> Tensor:
    """Compute softmax(q kᵀ / √D) v for one query per row, (B, A·D), with autograd.

    Args:
        query: (B, A·D), contiguous. It belongs to the first token of its row.
        key_value: (T, 2·A·D), contiguous: the keys of all heads, then the values.
        cu_seqlens: int32 (R + 1,): the start of each row, and T; R is at least B. The result of an empty row is 0.
        heads: A. D must be 16, 32, 64 or 128.
        dropout: Dropout probability of the attention weights.
        window: The query attends to the first ``window + 1`` tokens of its row; None for the whole row.
    """
    attended: Tensor = _FirstTokenAttention.apply(query, key_value, cu_seqlens, heads, dropout, window)
    return attended


class _FirstTokenAttention(FirstDerivative):
    refusal = "the kernel first_token_attention has no second derivative (create_graph=True); remove fused_layers"

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_value: Tensor, cu: Tensor, heads: int, dropout: float, window: int | None
    ) -> Tensor:
        (seed,) = draw_seeds(1, query.device, dropout=dropout > 0)
        out, logs = first_token_forward(query, key_value, cu, heads, dropout, seed, window)
        ctx.save_for_backward(query, key_value, out, logs, cu, seed)
        ctx.settings = dropout, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        query, key_value, out, logs, cu, seed = ctx.saved_tensors
        dropout, window = ctx.settings
        gradients = first_token_backward(grad.contiguous(), query, key_value, out, logs, cu, dropout, seed, window)
        return *gradients, None, None, None, None


def first_token_forward(
    query: Tensor,
    key_value: Tensor,
    cu_seqlens: Tensor,
    heads: int,
    dropout: float,
    seed: Tensor,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result (B, A·D), and the base-2 logarithms of the softmax's denominators, float32 (A, B).

    Args:
        query, key_value, cu_seqlens, heads, dropout, window: As in :func:`first_token_attention`.
        seed: int32 (1,), on the device; the same seed drops the same weights.
    """
    rows, hidden = query.shape
    out = torch.empty_like(query)
    logs = torch.empty(heads, rows, device=query.device, dtype=torch.float32)
    size = hidden // heads
    _first_token_forward[(heads, rows)](
        query, key_value, cu_seqlens, out, logs, seed, rows, size**-0.5 * 1.4426950408889634, threshold_of(dropout),
        1 / (1 - dropout), HIDDEN=hidden, SIZE=size, DROPOUT=dropout > 0, WINDOW=-1 if window is None else window,
        **_BLOCK,
    )  # fmt: skip
    return out, logs


def first_token_backward(
    grad_out: Tensor,
    query: Tensor,
    key_value: Tensor,
    out: Tensor,
    logs: Tensor,
    cu_seqlens: Tensor,
    dropout: float,
    seed: Tensor,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``query`` (B, A·D) and ``key_value`` (T, 2·A·D), which is 0 in rows without a query.

    Args:
        grad_out: Gradient of ``out``; contiguous.
        query, key_value, cu_seqlens, dropout, seed, window: As in :func:`first_token_forward`.
        out, logs: As returned by :func:`first_token_forward`.
    """
    rows, hidden = query.shape
    heads = logs.shape[0]
    size = hidden // heads
    grad_query, grad_key_value = torch.empty_like(query), torch.empty_like(key_value)
    _first_token_backward[(heads, len(cu_seqlens) - 1)](
        grad_out, query, key_value, out, logs, grad_query, grad_key_value, cu_seqlens, seed, rows, size**-0.5,
        threshold_of(dropout), 1 / (1 - dropout), HIDDEN=hidden, SIZE=size, DROPOUT=dropout > 0,
        WINDOW=-1 if window is None else window, **_BLOCK,
    )  # fmt: skip
    return grad_query, grad_key_value


@triton.jit(do_not_specialize=["rows"])
def _first_token_forward(
    query_ptr, key_value_ptr, cu_seqlens_ptr, out_ptr, logs_ptr, seed_ptr, rows, scale, threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + row)
    length = tl.load(cu_seqlens_ptr + row + 1) - start
    if WINDOW >= 0:
        length = tl.minimum(length, WINDOW + 1)
    units = tl.arange(0, SIZE)
    at = row * HIDDEN + head * SIZE + units
    q = tl.load(query_ptr + at).to(tl.float32)
    row_bits = query_bits(seed_ptr, head, row, 0)
    maximum = float("-inf")
    total = 0.0
    out = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, length, COLUMNS):
        keys = begin + tl.arange(0, COLUMNS)
        valid = keys < length
        key_at = (start + keys).to(tl.int64)[:, None] * (2 * HIDDEN) + head * SIZE + units[None, :]
        k = tl.load(key_value_ptr + key_at, mask=valid[:, None], other=0.0).to(tl.float32)
        v = tl.load(key_value_ptr + key_at + HIDDEN, mask=valid[:, None], other=0.0).to(tl.float32)
        scores = tl.where(valid, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        weights = tl.exp2(scores - new_maximum)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 0)
        maximum = new_maximum
        if DROPOUT:
            weights = tl.where(mix_bits(row_bits, spread_bits(keys)) >= threshold, weights, 0.0)
        out = out * rescale + tl.sum(weights[:, None] * v, 0)
    if length > 0:
        out *= kept_scale / total
        tl.store(logs_ptr + head * rows + row, maximum + tl.log2(total))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def _first_token_backward(
    grad_out_ptr, query_ptr, key_value_ptr, out_ptr, logs_ptr, grad_query_ptr, grad_key_value_ptr, cu_seqlens_ptr,
    seed_ptr, rows, scale, threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + row)
    length = tl.load(cu_seqlens_ptr + row + 1) - start
    has_query = row < rows
    reach = tl.where(has_query, length, 0)
    if WINDOW >= 0:
        reach = tl.minimum(reach, WINDOW + 1)
    units = tl.arange(0, SIZE)
    at = row * HIDDEN + head * SIZE + units
    query_mask = has_query & (units < SIZE)  # has_query for every unit
    q = tl.load(query_ptr + at, mask=query_mask, other=0.0).to(tl.float32)
    grad_out = tl.load(grad_out_ptr + at, mask=query_mask, other=0.0).to(tl.float32)
    delta = tl.sum(grad_out * tl.load(out_ptr + at, mask=query_mask, other=0.0).to(tl.float32), 0)
    log = tl.load(logs_ptr + head * rows + row, mask=has_query, other=0.0)
    row_bits = query_bits(seed_ptr, head, row, 0)
    grad_query = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, length, COLUMNS):
        keys = begin + tl.arange(0, COLUMNS)
        valid = keys < length
        key_at = (start + keys).to(tl.int64)[:, None] * (2 * HIDDEN) + head * SIZE + units[None, :]
        k = tl.load(key_value_ptr + key_at, mask=valid[:, None], other=0.0).to(tl.float32)
        v = tl.load(key_value_ptr + key_at + HIDDEN, mask=valid[:, None], other=0.0).to(tl.float32)
        scores = tl.sum(q[None, :] * k, 1) * (scale * 1.4426950408889634)
        weights = tl.where(keys < reach, tl.exp2(scores - log), 0.0)
        grad_weights = tl.sum(grad_out[None, :] * v, 1) * kept_scale
        kept = weights
        if DROPOUT:
            keep = mix_bits(row_bits, spread_bits(keys)) >= threshold
            kept = tl.where(keep, weights, 0.0)
            grad_weights = tl.where(keep, grad_weights, 0.0)
        grad_scores = weights * (grad_weights - delta) * scale
        grad_query += tl.sum(grad_scores[:, None] * k, 0)
        dtype = grad_key_value_ptr.dtype.element_ty
        grad_k, grad_v = grad_scores[:, None] * q[None, :], (kept * kept_scale)[:, None] * grad_out[None, :]
        tl.store(grad_key_value_ptr + key_at, grad_k.to(dtype), mask=valid[:, None])
        tl.store(grad_key_value_ptr + key_at + HIDDEN, grad_v.to(dtype), mask=valid[:, None])
    tl.store(grad_query_ptr + at, grad_query.to(grad_query_ptr.dtype.element_ty), mask=query_mask)
