"""Variable-length self-attention with dropout over packed queries, keys and values, for rows of up to some 512 tokens.

The products of one projection come in as one tensor and their gradients go out as one, so that no copy stands between
attention and the matrix products around it.

Shapes: T tokens, A heads, D units a head, R rows. The softmax and its sums are in float32.
Source: Dao, arXiv 2307.08691, for the order of the blocks; the kernels are this project's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.attention_backward import (
    attention_key_gradients,
    attention_query_gradients,
)
from composer_speedups.kernels.dropout_bits import hash_bits, mix_bits, spread_bits
from composer_speedups.kernels.norm import threshold_of

__all__ = ["attention_backward", "attention_forward"]

# Queries (rows) and keys (columns) a block, warps, and loads in flight: the fastest measured on an H200. Beyond 128
# registers a thread, a multiprocessor has room for three blocks and not four.
_FORWARD = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
_QUERIES = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
_KEYS = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}


def attention_forward(
    qkv: Tensor, cu_seqlens: Tensor, longest: int, heads: int, dropout: float, seed: Tensor
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √D) v, row by row.

    Args:
        qkv: (T, 3·A·D), contiguous: the queries of all heads, then the keys, then the values.
        cu_seqlens: int32 (R + 1,): where each row starts, and T.
        longest: A bound on the length of a row.
        heads: A. D must be 16, 32, 64 or 128.
        dropout: Probability of dropping a weight.
        seed: int32 (1,), on the device; the same one drops the same weights.

    Returns:
        (T, A·D), and the logarithm to base 2 of the softmax's denominators, float32 (A, T).
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    out = torch.empty(tokens, hidden, device=qkv.device, dtype=qkv.dtype)
    logs = torch.empty(heads, tokens, device=qkv.device, dtype=torch.float32)
    _attention_forward[(triton.cdiv(longest, _FORWARD["ROWS"]), heads, len(cu_seqlens) - 1)](
        qkv, cu_seqlens, out, logs, seed, tokens, size**-0.5 * 1.4426950408889634, threshold_of(dropout),
        1 / (1 - dropout), HIDDEN=hidden, SIZE=size, DROPOUT=dropout > 0, **_FORWARD,
    )  # fmt: skip
    return out, logs


def attention_backward(
    grad_out: Tensor,
    qkv: Tensor,
    out: Tensor,
    logs: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    dropout: float,
    seed: Tensor,
) -> Tensor:
    """The gradient of ``qkv``, (T, 3·A·D).

    Args:
        grad_out: Of ``out``; contiguous.
        qkv, cu_seqlens, longest, dropout, seed: As in :func:`attention_forward`.
        out, logs: What it returned.
    """
    tokens, hidden = out.shape
    heads = logs.shape[0]
    size = hidden // heads
    grad = torch.empty_like(qkv)
    delta = torch.empty_like(logs)
    bits = torch.empty_like(logs, dtype=torch.int32)
    scale, rows = size**-0.5, len(cu_seqlens) - 1
    common = (tokens, scale, threshold_of(dropout), 1 / (1 - dropout))
    constants = {"HIDDEN": hidden, "SIZE": size, "DROPOUT": dropout > 0}
    attention_query_gradients[(triton.cdiv(longest, _QUERIES["ROWS"]), heads, rows)](
        grad_out, qkv, out, logs, delta, bits, grad, cu_seqlens, seed, *common, **constants, **_QUERIES
    )
    attention_key_gradients[(triton.cdiv(longest, _KEYS["COLUMNS"]), heads, rows)](
        grad_out, qkv, logs, delta, bits, grad, cu_seqlens, *common, **constants, **_KEYS
    )
    return grad


@triton.jit
def _attention_forward(
    qkv_ptr, cu_seqlens_ptr, out_ptr, logs_ptr, seed_ptr, tokens, scale, threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= length:
        return
    queries = first + tl.arange(0, ROWS)
    units = tl.arange(0, SIZE)
    seed = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    row_bits = hash_bits((start + queries).to(tl.uint32) ^ hash_bits(seed + head.to(tl.uint32)))
    at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
    q = tl.load(qkv_ptr + at, mask=queries[:, None] < length, other=0.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, SIZE), tl.float32)
    for begin in range(0, length, COLUMNS):
        keys = begin + tl.arange(0, COLUMNS)
        key_at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
        k = tl.load(qkv_ptr + key_at, mask=keys[:, None] < length, other=0.0)
        v = tl.load(qkv_ptr + key_at + HIDDEN, mask=keys[:, None] < length, other=0.0)
        scores = tl.where(keys[None, :] < length, tl.dot(q, tl.trans(k)), float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weights, 1)
        most = higher
        if DROPOUT:
            bits = mix_bits(row_bits[:, None], spread_bits(keys)[None, :])
            weights = tl.where(bits >= threshold, weights, 0.0)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
    out *= (kept_scale / total)[:, None]
    out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=queries[:, None] < length)
    tl.store(logs_ptr + head * tokens + start + queries, most + tl.log2(total), mask=queries < length)
