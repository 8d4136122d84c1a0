"""DeBERTa's disentangled attention over packed queries, keys and values.

A score has three terms: query and key, query and the distance to the key, key and the distance to the query. A distance
is a diagonal of the score matrix. The distance terms are computed once per block of tokens and stored in 16 bits by
token and distance, and the attention kernel loads them by pair of tokens. Through memory, turning diagonals into
columns only changes addresses; in registers, it would need shared memory and shuffles. The backward pass recomputes
these terms, and stores the gradients of the scores by pair of tokens, once with a row per query and once with a row per
key; later kernels load them by pair or by diagonal. All sums are matmuls without atomic additions, so gradients are
deterministic.

Shapes: T tokens, A heads, D units per head, R rows, L a multiple of 64 and at least the length of every row, P entries
of the table of positions. The softmax and its sums are float32. A block has ``_BLOCK`` = 64 tokens. The stored matrices
have one spare block on either side, so no mask is needed along a row. Their width is a compile-time constant, for cheap
addresses, and a power of two plus these two blocks, so that few widths are compiled.
Source: He et al., arXiv 2006.03654, for the attention; Dao, arXiv 2307.08691, for the order of the blocks; the kernels
were written for this project.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.attention import attention_operator, forward_kernel
from composer_speedups.kernels.dropout import draw_seeds, mix_bits, query_bits, spread_bits, threshold_of

__all__ = ["attend", "disentangled_backward", "disentangled_forward"]

_BLOCK = tl.constexpr(64)  # tokens or diagonals per block
# Warps, pipeline stages and registers per thread: the fastest measured on an H200.
_POSITIONS = {"num_warps": 4, "num_stages": 1}
_FORWARD = {"num_warps": 4, "num_stages": 1, "maxnreg": 128}
_QUERIES = {"num_warps": 4, "num_stages": 1}
_KEYS = {"num_warps": 4, "num_stages": 2}
_TABLE = {"num_warps": 4, "num_stages": 3}
_CHUNKS = 16  # chunks of rows; the table's gradient is summed within chunks, then over chunks


def disentangled_forward(
    qkv: Tensor,
    positions: Tensor,
    entries: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    heads: int,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute softmax((q kᵀ + q·position key + k·position query) / √(3·D)) v for each row.

    Args:
        qkv: (T, 3·A·D), contiguous: the queries of all heads, then the keys, then the values.
        positions: (P, 2·A·D), contiguous, of the same dtype: the keys of positions, then the queries of positions.
        entries: int32 (2·L + 1,), ascending: the entry of ``positions`` for each distance from -L to L. A distance is
            the query's position minus the key's.
        cu_seqlens: int32 (R + 1,): the start of each row, and T.
        longest: L, a multiple of 64 and at least the length of every row.
        heads: A. D must be 16, 32, 64 or 128.
        dropout: Dropout probability of the attention weights.
        seed: int32 (1,), on the device; the same seed drops the same weights.

    Returns:
        The result (T, A·D), and the base-2 logarithms of the softmax's denominators, float32 (A, T).
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    out = torch.empty(tokens, hidden, device=qkv.device, dtype=qkv.dtype)
    logs = torch.empty(heads, tokens, device=qkv.device, dtype=torch.float32)
    by_query, by_key = _position_scores(qkv, positions.index_select(0, entries), cu_seqlens, longest, heads)
    forward_kernel[(longest // 64, heads, len(cu_seqlens) - 1)](
        qkv, cu_seqlens, out, logs, seed, out, seed, logs, by_query, by_key, longest, tokens,
        _scale(size) * 1.4426950408889634, threshold_of(dropout), 1 / (1 - dropout), HIDDEN=hidden, SIZE=size,
        DROPOUT=dropout > 0, WINDOW=-1, FLOAT8=False, BIAS=False, WIDTH=by_query.shape[2], ROWS=64, COLUMNS=64,
        **_FORWARD,
    )  # fmt: skip
    return out, logs


def disentangled_backward(
    grad_out: Tensor,
    qkv: Tensor,
    positions: Tensor,
    entries: Tensor,
    out: Tensor,
    logs: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``qkv``, (T, 3·A·D), and of ``positions``, float32 (P, 2·A·D).

    Args:
        grad_out: Gradient of ``out``.
        qkv, positions, entries, cu_seqlens, longest, dropout, seed: As in :func:`disentangled_forward`.
        out, logs: As returned by :func:`disentangled_forward`.
    """
    grad_out = grad_out.contiguous()
    tokens, hidden = out.shape
    heads, rows = logs.shape[0], len(cu_seqlens) - 1
    size = hidden // heads
    grad = torch.empty_like(qkv)
    by_distance = positions.index_select(0, entries)
    by_query, by_key = _position_scores(qkv, by_distance, cu_seqlens, longest, heads)
    weights, of_query, of_key = (torch.empty_like(by_query) for _ in range(3))
    kept_scale, constants = 1 / (1 - dropout), {"HIDDEN": hidden, "SIZE": size, "WIDTH": by_query.shape[2]}
    grid = (longest // 64, heads, rows)
    _query_gradients[grid](
        grad_out, qkv, by_distance, out, logs, by_query, by_key, weights, of_query, of_key, grad, cu_seqlens, seed,
        tokens, longest, _scale(size), threshold_of(dropout), kept_scale, **constants, DROPOUT=dropout > 0, **_QUERIES,
    )  # fmt: skip
    _key_gradients[grid](
        grad_out, qkv, by_distance, weights, of_key, grad, cu_seqlens, tokens, longest, _scale(size), kept_scale,
        **constants, **_KEYS,
    )  # fmt: skip
    chunk = triton.cdiv(rows, _CHUNKS)
    chunks = triton.cdiv(rows, chunk)
    sums = torch.empty(chunks, 2 * longest, 2 * hidden, device=qkv.device, dtype=torch.float32)
    _table_gradients[(2 * longest // 64, heads, chunks)](
        qkv, of_query, of_key, sums, cu_seqlens, tokens, longest, _scale(size), rows, chunk, **constants, **_TABLE
    )  # fmt: skip
    grad_positions = torch.empty(len(positions), 2 * hidden, device=qkv.device, dtype=torch.float32)
    wanted = torch.arange(len(positions) + 1, device=entries.device, dtype=entries.dtype)
    bounds = torch.searchsorted(entries, wanted, out_int32=True)
    block = min(triton.next_power_of_2(2 * hidden), 256)
    _sum_distances[(len(positions), triton.cdiv(2 * hidden, block))](
        sums, bounds, grad_positions, chunks, 2 * longest, 2 * hidden, BLOCK=block, num_warps=2
    )
    return grad, grad_positions


def attend(
    qkv: Tensor, positions: Tensor, entries: Tensor, cu_seqlens: Tensor, longest: int, heads: int, dropout: float
) -> Tensor:
    """Run :func:`disentangled_forward` as a custom operator with autograd, opaque to ``torch.compile``; (T, A·D)."""
    (seed,) = draw_seeds(1, qkv.device, dropout=dropout > 0)
    out, _ = _operator(qkv, positions, entries, cu_seqlens, longest, heads, dropout, seed)
    return out


def _scale(size: int) -> float:
    return float((3 * size) ** -0.5)


def _position_scores(
    qkv: Tensor, by_distance: Tensor, cu_seqlens: Tensor, longest: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Return the unscaled scores of queries with key positions and of keys with query positions.

    Both are stored by diagonal, (A, T, next_power_of_2(L) + 128).
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    width = triton.next_power_of_2(longest) + 128
    assert longest % 64 == 0
    scores = torch.empty(2, heads, tokens, width, device=qkv.device, dtype=qkv.dtype)
    steps = longest // 64 + 1
    _score_positions[(longest // 64 * steps, heads, len(cu_seqlens) - 1)](
        qkv, by_distance, scores[0], scores[1], cu_seqlens, tokens, longest, steps,
        HIDDEN=hidden, SIZE=hidden // heads, WIDTH=width, **_POSITIONS,
    )  # fmt: skip
    return scores[0], scores[1]


_operator = attention_operator(
    "disentangled_attention", disentangled_forward, disentangled_backward, "Tensor positions, Tensor entries",
    "float dropout",
)  # fmt: skip


# For token ``first + r`` of a block, diagonal ``e`` is the pair with position ``e - _BLOCK + r`` of the row. For every
# query of the block, diagonal e has the distance first + _BLOCK - e; for every key, e - _BLOCK - first.


@triton.jit
def _table_at(distances, longest, head, HIDDEN: tl.constexpr, SIZE: tl.constexpr):
    """Return the offsets of the position keys for some distances, (n, D); position queries are at ``HIDDEN`` more."""
    return (distances + longest)[:, None] * (2 * HIDDEN) + head * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def _score_positions(
    qkv_ptr, positions_ptr, by_query_ptr, by_key_ptr, cu_seqlens_ptr, tokens, longest, steps,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) // steps * _BLOCK
    begin = tl.program_id(0) % steps * _BLOCK
    if first >= length or begin >= length + _BLOCK:
        return
    local = tl.arange(0, _BLOCK)
    valid = (first + local < length)[:, None]
    at = (start + first + local).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + tl.arange(0, SIZE)[None, :]
    diagonal = begin + tl.arange(0, _BLOCK)
    scores_at = (head * tokens + start + first + local).to(tl.int64)[:, None] * WIDTH + diagonal[None, :]
    q = tl.load(qkv_ptr + at, mask=valid, other=0.0)
    keys = tl.load(positions_ptr + _table_at(first + _BLOCK - diagonal, longest, head, HIDDEN, SIZE))
    tl.store(by_query_ptr + scores_at, tl.dot(q, tl.trans(keys)).to(by_query_ptr.dtype.element_ty), mask=valid)
    k = tl.load(qkv_ptr + at + HIDDEN, mask=valid, other=0.0)
    queries = tl.load(positions_ptr + _table_at(diagonal - _BLOCK - first, longest, head, HIDDEN, SIZE) + HIDDEN)
    tl.store(by_key_ptr + scores_at, tl.dot(k, tl.trans(queries)).to(by_key_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _query_gradients(
    grad_out_ptr, qkv_ptr, positions_ptr, out_ptr, logs_ptr, by_query_ptr, by_key_ptr, weights_ptr, of_query_ptr,
    of_key_ptr, grad_ptr, cu_seqlens_ptr, seed_ptr, tokens, longest, scale, threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of queries.

    Also stores the kept weights, and the unscaled gradients of the scores with a row per query and with a row per key,
    each between two blocks of zeros.
    """
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * _BLOCK
    if first >= length:
        return
    local = tl.arange(0, _BLOCK)
    queries = first + local
    units = tl.arange(0, SIZE)
    valid = queries < length
    row_bits = query_bits(seed_ptr, head, start, queries)
    at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
    out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
    q = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    grad_out = tl.load(grad_out_ptr + out_at, mask=valid[:, None], other=0.0)
    out = tl.load(out_ptr + out_at, mask=valid[:, None], other=0.0)
    logs = tl.load(logs_ptr + head * tokens + start + queries, mask=valid, other=float("inf"))
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    of_row = (head * tokens + start).to(tl.int64) * WIDTH
    of_block = of_row + first * WIDTH
    by_query_ptr += of_block
    by_key_ptr += of_row + first
    weights_ptr += of_block + _BLOCK
    of_query_ptr += of_block
    of_key_ptr += of_row
    row_at = local[:, None] * (WIDTH - 1) + (local + _BLOCK)[None, :]  # as in forward_kernel
    pair_at = local[:, None] * WIDTH + local[None, :]
    zeros = tl.zeros((_BLOCK, _BLOCK), of_query_ptr.dtype.element_ty)
    blocks_end = (length + _BLOCK - 1) // _BLOCK * _BLOCK
    tl.store(of_query_ptr + pair_at, zeros, mask=valid[:, None])
    tl.store(of_query_ptr + _BLOCK + blocks_end + pair_at, zeros, mask=valid[:, None])
    tl.store(of_key_ptr + first * WIDTH + pair_at, zeros, mask=valid[:, None])
    tl.store(of_key_ptr + first * WIDTH + _BLOCK + blocks_end + pair_at, zeros, mask=valid[:, None])
    grad = tl.zeros((_BLOCK, SIZE), tl.float32)
    for begin in range(0, length, _BLOCK):
        keys = begin + local
        real = keys < length
        key_at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
        k = tl.load(qkv_ptr + key_at, mask=real[:, None], other=0.0)
        v = tl.load(qkv_ptr + key_at + HIDDEN, mask=real[:, None], other=0.0)
        by_query = tl.load(by_query_ptr + begin + row_at, mask=valid[:, None], other=0.0)
        by_key = tl.load(by_key_ptr + begin * WIDTH + row_at, mask=real[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) + by_query.to(tl.float32) + tl.trans(by_key).to(tl.float32)
        weights = tl.where(
            real[None, :] & valid[:, None], tl.exp2(scores * (scale * 1.4426950408889634) - logs[:, None]), 0.0
        )
        grad_weights = tl.dot(grad_out, tl.trans(v)) * kept_scale
        kept = weights
        if DROPOUT:
            keep = mix_bits(row_bits[:, None], spread_bits(keys)[None, :]) >= threshold
            kept = tl.where(keep, weights, 0.0)
            grad_weights = tl.where(keep, grad_weights, 0.0)
        grad_scores = (weights * (grad_weights - delta[:, None])).to(k.dtype)
        tl.store(weights_ptr + begin + pair_at, kept.to(weights_ptr.dtype.element_ty), mask=valid[:, None])
        tl.store(of_query_ptr + _BLOCK + begin + pair_at, grad_scores, mask=valid[:, None])
        tl.store(of_key_ptr + begin * WIDTH + _BLOCK + first + pair_at, tl.trans(grad_scores), mask=real[:, None])
        grad += tl.dot(grad_scores, k)
    tl.debug_barrier()  # other threads of this block wrote the values that are loaded next
    slanted = local[:, None] * (WIDTH + 1) + local[None, :]
    for begin in range(0, blocks_end + _BLOCK, _BLOCK):
        grad_scores = tl.load(of_query_ptr + begin + slanted, mask=valid[:, None], other=0.0)
        keys = tl.load(positions_ptr + _table_at(first + _BLOCK - begin - local, longest, head, HIDDEN, SIZE))
        grad += tl.dot(grad_scores, keys)
    tl.store(grad_ptr + at, (grad * scale).to(grad_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _key_gradients(
    grad_out_ptr, qkv_ptr, positions_ptr, weights_ptr, of_key_ptr, grad_ptr, cu_seqlens_ptr, tokens, longest, scale,
    kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values from the matrices that :func:`_query_gradients` stored."""
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * _BLOCK
    if first >= length:
        return
    local = tl.arange(0, _BLOCK)
    keys = first + local
    units = tl.arange(0, SIZE)
    valid = (keys < length)[:, None]
    at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
    of_row = (head * tokens + start).to(tl.int64) * WIDTH
    weights_ptr += of_row + _BLOCK + first
    of_key_ptr += of_row + first * WIDTH
    pair_at = local[:, None] * WIDTH + local[None, :]
    grad_k = tl.zeros((_BLOCK, SIZE), tl.float32)
    grad_v = tl.zeros((_BLOCK, SIZE), tl.float32)
    for begin in range(0, length, _BLOCK):
        queries = begin + local
        real = (queries < length)[:, None]
        query_at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
        out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
        q = tl.load(qkv_ptr + query_at, mask=real, other=0.0)
        grad_out = tl.load(grad_out_ptr + out_at, mask=real, other=0.0)
        weights = tl.load(weights_ptr + begin * WIDTH + pair_at, mask=real, other=0.0)
        grad_scores = tl.load(of_key_ptr + _BLOCK + begin + pair_at, mask=valid, other=0.0)
        grad_v += tl.dot(tl.trans(weights), grad_out)
        grad_k += tl.dot(grad_scores, q)
    slanted = local[:, None] * (WIDTH + 1) + local[None, :]
    for begin in range(0, (length + 2 * _BLOCK - 1) // _BLOCK * _BLOCK, _BLOCK):
        grad_scores = tl.load(of_key_ptr + begin + slanted, mask=valid, other=0.0)
        at_distance = _table_at(begin + local - _BLOCK - first, longest, head, HIDDEN, SIZE) + HIDDEN
        grad_k += tl.dot(grad_scores, tl.load(positions_ptr + at_distance))
    tl.store(grad_ptr + at, (grad_k * scale).to(grad_ptr.dtype.element_ty), mask=valid)
    tl.store(grad_ptr + at + HIDDEN, (grad_v * kept_scale).to(grad_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _table_gradients(
    qkv_ptr, of_query_ptr, of_key_ptr, sums_ptr, cu_seqlens_ptr, tokens, longest, scale, rows, chunk,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of position keys and queries by distance over a chunk of rows: (chunks, 2·L, 2·A·D).

    A program sums keys at distances ``nearest + 1`` to ``nearest + _BLOCK``, and queries at distances one smaller.
    """
    head = tl.program_id(1)
    nearest = tl.program_id(0) * _BLOCK - longest
    local = tl.arange(0, _BLOCK)
    units = tl.arange(0, SIZE)
    slanted = local[:, None] * (WIDTH + 1) + local[None, :]
    grad_keys = tl.zeros((_BLOCK, SIZE), tl.float32)
    grad_queries = tl.zeros((_BLOCK, SIZE), tl.float32)
    first_row = tl.program_id(2) * chunk
    for row in range(first_row, tl.minimum(first_row + chunk, rows)):
        start = tl.load(cu_seqlens_ptr + row)
        length = tl.load(cu_seqlens_ptr + row + 1) - start
        blocks_end = (length + _BLOCK - 1) // _BLOCK * _BLOCK
        token = (head * tokens + start).to(tl.int64)
        for first in range(tl.maximum(nearest, 0), tl.minimum(length, blocks_end + nearest + 1), _BLOCK):
            real = (first + local < length)[:, None]
            grad_at = of_query_ptr + (token + first) * WIDTH + (first - nearest)
            grad = tl.load(grad_at + slanted, mask=real, other=0.0)
            at = (start + first + local).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
            grad_keys += tl.dot(tl.trans(grad), tl.load(qkv_ptr + at, mask=real, other=0.0))
        begin = tl.maximum(-nearest - _BLOCK, 0)
        for first in range(begin, tl.minimum(length, blocks_end - nearest), _BLOCK):
            real = (first + local < length)[:, None]
            grad_at = of_key_ptr + (token + first) * WIDTH + (first + nearest + _BLOCK)
            grad = tl.load(grad_at + slanted, mask=real, other=0.0)
            at = (start + first + local).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
            grad_queries += tl.dot(tl.trans(grad), tl.load(qkv_ptr + at, mask=real, other=0.0))
    sums_at = (tl.program_id(2) * 2 * longest + longest).to(tl.int64)
    distances = nearest + _BLOCK - local
    key_at = (sums_at + distances)[:, None] * (2 * HIDDEN) + head * SIZE + units[None, :]
    tl.store(sums_ptr + key_at, grad_keys * scale, mask=(distances < longest)[:, None])
    query_at = (sums_at + nearest + local)[:, None] * (2 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
    tl.store(sums_ptr + query_at, grad_queries * scale)


@triton.jit
def _sum_distances(sums_ptr, bounds_ptr, grad_ptr, chunks, distances, width, BLOCK: tl.constexpr):
    """Sum the gradient of each entry of the table over its distances and the chunks."""
    entry = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    begin = tl.maximum(tl.load(bounds_ptr + entry), 1)  # no pair has the distances -L and L
    end = tl.minimum(tl.load(bounds_ptr + entry + 1), distances)
    total = tl.zeros((BLOCK,), tl.float32)
    for distance in range(begin, end):
        for chunk in range(chunks):
            at = (chunk * distances + distance) * width
            total += tl.load(sums_ptr + at + columns, mask=inside, other=0.0)
    tl.store(grad_ptr + entry * width + columns, total, mask=inside)
