"""DeBERTa's attention over packed queries, keys and values: scores between tokens, between a query and the distance to
a key, and between a key and that distance.

The scores with distances are computed once for each block of tokens and laid down as the attention kernel reads them,
one number for each pair of tokens, in 16 bits: a distance is a diagonal of the scores, and moving diagonals is a matter
of addresses in memory but of shared memory and shuffles in registers. The backward pass computes them again, writes the
gradients of the scores over them, and sums those along the diagonals without atomic additions, so that a run repeats
bit for bit.

Shapes: T tokens, A heads, D units a head, R rows, L a bound on the length of a row, P entries of the table of positions.
The softmax and its sums are in float32.
Source: He et al., arXiv 2006.03654, for what is computed; Dao, arXiv 2307.08691, for the order of the blocks; the
kernels are this project's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.dropout_bits import hash_bits, mix_bits, spread_bits
from composer_speedups.kernels.norm import threshold_of

__all__ = ["attend", "disentangled_backward", "disentangled_forward"]

# Tokens a block, distances or tokens of the other side a step, warps, and loads in flight.
_POSITIONS = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
_FORWARD = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
_QUERIES = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
_KEYS = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
_TABLE = {"DISTANCES": 64, "ROWS": 64, "num_warps": 4, "num_stages": 2}
_CHUNKS = 16  # of rows, whose sums for the table's gradient are added up afterwards


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
    """softmax((q kᵀ + q·position key + k·position query) / √(3·D)) v, row by row.

    Args:
        qkv: (T, 3·A·D), contiguous: the queries of all heads, then the keys, then the values.
        positions: (P, 2·A·D), contiguous, of the same dtype: the keys of positions, then their queries.
        entries: int32 (2·L,), ascending: the entry of ``positions`` for the distances -L to L - 1 of a query from a key
            (its place less the key's).
        cu_seqlens: int32 (R + 1,): where each row starts, and T.
        longest: L, a bound on the length of a row.
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
    by_query, by_key = _position_scores(qkv, positions, entries, cu_seqlens, longest, heads)
    _disentangled_forward[(triton.cdiv(longest, _FORWARD["ROWS"]), heads, len(cu_seqlens) - 1)](
        qkv, by_query, by_key, cu_seqlens, out, logs, seed, tokens, by_query.shape[2], _scale(size) * _LOG2E,
        threshold_of(dropout), 1 / (1 - dropout), HIDDEN=hidden, SIZE=size, DROPOUT=dropout > 0, **_FORWARD,
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
    """The gradients of ``qkv``, (T, 3·A·D), and of ``positions``, float32 (P, 2·A·D).

    Args:
        grad_out: Of ``out``; contiguous.
        qkv, positions, entries, cu_seqlens, longest, dropout, seed: As in :func:`disentangled_forward`.
        out, logs: What it returned.
    """
    tokens, hidden = out.shape
    heads, rows = logs.shape[0], len(cu_seqlens) - 1
    size = hidden // heads
    grad = torch.empty_like(qkv)
    by_query, by_key = _position_scores(qkv, positions, entries, cu_seqlens, longest, heads)
    weights = torch.empty_like(by_query)
    common = (tokens, by_query.shape[2], longest, _scale(size))
    kept_scale, widths = 1 / (1 - dropout), {"HIDDEN": hidden, "SIZE": size}
    _query_gradients[(triton.cdiv(longest, _QUERIES["ROWS"]), heads, rows)](
        grad_out, qkv, positions, entries, out, logs, by_query, by_key, weights, grad, cu_seqlens, seed, *common,
        threshold_of(dropout), kept_scale, **widths, DROPOUT=dropout > 0, **_QUERIES,
    )  # fmt: skip
    _key_gradients[(triton.cdiv(longest, _KEYS["COLUMNS"]), heads, rows)](
        grad_out, qkv, positions, entries, by_key, weights, grad, cu_seqlens, *common, kept_scale, **widths, **_KEYS
    )
    chunk = triton.cdiv(rows, _CHUNKS)
    chunks = triton.cdiv(rows, chunk)
    sums = torch.empty(chunks, 2 * longest, 2 * hidden, device=qkv.device, dtype=torch.float32)
    _table_gradients[(triton.cdiv(2 * longest, _TABLE["DISTANCES"]), heads, chunks)](
        qkv, by_query, by_key, sums, cu_seqlens, *common, rows, chunk, **widths, **_TABLE
    )
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
    """:func:`disentangled_forward` with a gradient, as an operator that ``torch.compile`` leaves alone; (T, A·D)."""
    if dropout:
        seed = torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=qkv.device)
    else:
        seed = torch.zeros(1, dtype=torch.int32, device=qkv.device)
    out, _ = _operator(qkv, positions, entries, cu_seqlens, longest, heads, dropout, seed)
    return out  # type: ignore[no-any-return]


_LOG2E = 1.4426950408889634


def _scale(size: int) -> float:
    return float((3 * size) ** -0.5)


def _position_scores(
    qkv: Tensor, positions: Tensor, entries: Tensor, cu_seqlens: Tensor, longest: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Of queries with the positions of their keys, and of keys with those of their queries, (A, T, L) both, without the
    scale: a query's or a key's own row, and in it the place of the other in its row of tokens."""
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    width = triton.cdiv(longest, 16) * 16  # round, for loads of several numbers
    scores = torch.empty(2, heads, tokens, width, device=qkv.device, dtype=qkv.dtype)
    _score_positions[(triton.cdiv(longest, _POSITIONS["ROWS"]), heads, len(cu_seqlens) - 1)](
        qkv, positions, entries, scores[0], scores[1], cu_seqlens, tokens, width, longest,
        HIDDEN=hidden, SIZE=hidden // heads, **_POSITIONS,
    )  # fmt: skip
    return scores[0], scores[1]


@torch.library.custom_op("composer_speedups::disentangled_attention", mutates_args=())
def _operator(
    qkv: Tensor,
    positions: Tensor,
    entries: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    heads: int,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    return disentangled_forward(qkv, positions, entries, cu_seqlens, longest, heads, dropout, seed)


@_operator.register_fake
def _(
    qkv: Tensor,
    positions: Tensor,
    entries: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    heads: int,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    tokens = qkv.shape[0]
    return qkv.new_empty(tokens, qkv.shape[1] // 3), qkv.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("composer_speedups::disentangled_attention_backward", mutates_args=())
def _operator_backward(
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
    return disentangled_backward(
        grad_out.contiguous(), qkv, positions, entries, out, logs, cu_seqlens, longest, dropout, seed
    )


@_operator_backward.register_fake
def _(
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
    return torch.empty_like(qkv), torch.empty_like(positions, dtype=torch.float32)


def _keep(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, positions, entries, cu_seqlens, ctx.longest, _, ctx.dropout, seed = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(qkv, positions, entries, *output, cu_seqlens, seed)  # type: ignore[attr-defined]


def _differentiate(ctx: object, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    qkv, positions, entries, out, logs, cu_seqlens, seed = ctx.saved_tensors  # type: ignore[attr-defined]
    grad, grad_positions = _operator_backward(
        grad_out, qkv, positions, entries, out, logs, cu_seqlens, ctx.longest, ctx.dropout, seed  # type: ignore[attr-defined]
    )
    return grad, grad_positions.to(positions.dtype), None, None, None, None, None, None


_operator.register_autograd(_differentiate, setup_context=_keep)


# A block of tokens and one of ``COLUMNS`` diagonals: token ``first + r`` and diagonal ``e`` meet in the place
# ``e - (ROWS - 1) + r`` of the row, which is ``first + ROWS - 1 - e`` before the token, whichever token it is.


@triton.jit
def _table_rows(positions_ptr, entries_ptr, distances, longest, head, SECOND: tl.constexpr, HIDDEN: tl.constexpr,
                SIZE: tl.constexpr):  # fmt: skip
    """The rows of the table for distances, (n, D): position keys, or queries if ``SECOND``."""
    known = (distances >= -longest) & (distances < longest)
    entry = tl.load(entries_ptr + distances + longest, mask=known, other=0)
    at = entry[:, None] * (2 * HIDDEN) + SECOND * HIDDEN + head * SIZE + tl.arange(0, SIZE)[None, :]
    return tl.load(positions_ptr + at, mask=known[:, None], other=0.0)


@triton.jit
def _score_positions(
    qkv_ptr, positions_ptr, entries_ptr, by_query_ptr, by_key_ptr, cu_seqlens_ptr, tokens, width, longest,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= length:
        return
    local = tl.arange(0, ROWS)
    valid = first + local < length
    at = (start + first + local).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + tl.arange(0, SIZE)[None, :]
    q = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    k = tl.load(qkv_ptr + at + HIDDEN, mask=valid[:, None], other=0.0)
    row_at = (head * tokens + start + first + local).to(tl.int64) * width
    for begin in range(0, length + ROWS - 1, COLUMNS):
        diagonal = begin + tl.arange(0, COLUMNS)
        before = first + ROWS - 1 - diagonal
        other = diagonal[None, :] - (ROWS - 1) + local[:, None]
        inside = (other >= 0) & (other < length) & valid[:, None]
        keys = _table_rows(positions_ptr, entries_ptr, before, longest, head, 0, HIDDEN, SIZE)
        scores = tl.dot(q, tl.trans(keys))
        tl.store(by_query_ptr + row_at[:, None] + other, scores.to(by_query_ptr.dtype.element_ty), mask=inside)
        queries = _table_rows(positions_ptr, entries_ptr, -before, longest, head, 1, HIDDEN, SIZE)
        scores = tl.dot(k, tl.trans(queries))
        tl.store(by_key_ptr + row_at[:, None] + other, scores.to(by_key_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _disentangled_forward(
    qkv_ptr, by_query_ptr, by_key_ptr, cu_seqlens_ptr, out_ptr, logs_ptr, seed_ptr, tokens, width, scale, threshold,
    kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= length:
        return
    queries = first + tl.arange(0, ROWS)
    valid = queries < length
    units = tl.arange(0, SIZE)
    seed = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    row_bits = hash_bits((start + queries).to(tl.uint32) ^ hash_bits(seed + head.to(tl.uint32)))
    at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
    q = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    pairs = (head * tokens + start).to(tl.int64) * width
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, SIZE), tl.float32)
    for begin in range(0, length, COLUMNS):
        keys = begin + tl.arange(0, COLUMNS)
        real = keys < length
        key_at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
        k = tl.load(qkv_ptr + key_at, mask=real[:, None], other=0.0)
        v = tl.load(qkv_ptr + key_at + HIDDEN, mask=real[:, None], other=0.0)
        by_query = tl.load(
            by_query_ptr + pairs + queries[:, None] * width + keys[None, :], mask=valid[:, None] & real[None, :], other=0.0
        )
        by_key = tl.load(
            by_key_ptr + pairs + keys[:, None] * width + queries[None, :], mask=real[:, None] & valid[None, :], other=0.0
        )
        scores = tl.dot(q, tl.trans(k)) + by_query.to(tl.float32) + tl.trans(by_key).to(tl.float32)
        scores = tl.where(real[None, :], scores, float("-inf"))
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
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(logs_ptr + head * tokens + start + queries, most + tl.log2(total), mask=valid)


@triton.jit
def _query_gradients(
    grad_out_ptr, qkv_ptr, positions_ptr, entries_ptr, out_ptr, logs_ptr, by_query_ptr, by_key_ptr, weights_ptr,
    grad_ptr, cu_seqlens_ptr, seed_ptr, tokens, width, longest, scale, threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a block of queries; leaves the gradients of the scores, without their scale, in the place of the scores with
    positions, (A, T, L) by query and by key, and the weights that were kept."""
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= length:
        return
    local = tl.arange(0, ROWS)
    queries = first + local
    units = tl.arange(0, SIZE)
    valid = queries < length
    seed = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    row_bits = hash_bits((start + queries).to(tl.uint32) ^ hash_bits(seed + head.to(tl.uint32)))
    at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
    out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
    q = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    grad_out = tl.load(grad_out_ptr + out_at, mask=valid[:, None], other=0.0)
    out = tl.load(out_ptr + out_at, mask=valid[:, None], other=0.0)
    logs = tl.load(logs_ptr + head * tokens + start + queries, mask=valid, other=float("inf"))
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    pairs = (head * tokens + start).to(tl.int64) * width
    grad = tl.zeros((ROWS, SIZE), tl.float32)
    for begin in range(0, length, COLUMNS):
        keys = begin + tl.arange(0, COLUMNS)
        real = keys < length
        key_at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
        k = tl.load(qkv_ptr + key_at, mask=real[:, None], other=0.0)
        v = tl.load(qkv_ptr + key_at + HIDDEN, mask=real[:, None], other=0.0)
        pair_at = pairs + queries[:, None] * width + keys[None, :]
        pair_of_key_at = pairs + keys[:, None] * width + queries[None, :]
        both = valid[:, None] & real[None, :]
        both_of_key = real[:, None] & valid[None, :]
        by_query = tl.load(by_query_ptr + pair_at, mask=both, other=0.0)
        by_key = tl.load(by_key_ptr + pair_of_key_at, mask=both_of_key, other=0.0)
        scores = tl.dot(q, tl.trans(k)) + by_query.to(tl.float32) + tl.trans(by_key).to(tl.float32)
        weights = tl.where(real[None, :], tl.exp2(scores * (scale * 1.4426950408889634) - logs[:, None]), 0.0)
        grad_weights = tl.dot(grad_out, tl.trans(v)) * kept_scale
        kept = weights
        if DROPOUT:
            keep = mix_bits(row_bits[:, None], spread_bits(keys)[None, :]) >= threshold
            kept = tl.where(keep, weights, 0.0)
            grad_weights = tl.where(keep, grad_weights, 0.0)
        grad_scores = (weights * (grad_weights - delta[:, None])).to(k.dtype)
        tl.store(weights_ptr + pair_at, kept.to(weights_ptr.dtype.element_ty), mask=both)
        tl.store(by_query_ptr + pair_at, grad_scores, mask=both)
        tl.store(by_key_ptr + pair_of_key_at, tl.trans(grad_scores), mask=both_of_key)
        grad += tl.dot(grad_scores, k)
    tl.debug_barrier()  # what is read next was written by other threads of this block
    row_at = pairs + queries * width
    for begin in range(0, length + ROWS - 1, COLUMNS):
        diagonal = begin + tl.arange(0, COLUMNS)
        other = diagonal[None, :] - (ROWS - 1) + local[:, None]
        inside = (other >= 0) & (other < length) & valid[:, None]
        grad_scores = tl.load(by_query_ptr + row_at[:, None] + other, mask=inside, other=0.0)
        before = first + ROWS - 1 - diagonal
        keys = _table_rows(positions_ptr, entries_ptr, before, longest, head, 0, HIDDEN, SIZE)
        grad += tl.dot(grad_scores, keys)
    tl.store(grad_ptr + at, (grad * scale).to(grad_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _key_gradients(
    grad_out_ptr, qkv_ptr, positions_ptr, entries_ptr, by_key_ptr, weights_ptr, grad_ptr, cu_seqlens_ptr, tokens, width,
    longest, scale, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a block of keys and their values, from what :func:`_query_gradients` left."""
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * COLUMNS
    if first >= length:
        return
    local = tl.arange(0, COLUMNS)
    keys = first + local
    units = tl.arange(0, SIZE)
    valid = keys < length
    at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
    pairs = (head * tokens + start).to(tl.int64) * width
    row_at = pairs + keys * width
    grad_k = tl.zeros((COLUMNS, SIZE), tl.float32)
    grad_v = tl.zeros((COLUMNS, SIZE), tl.float32)
    for begin in range(0, length, ROWS):
        queries = begin + tl.arange(0, ROWS)
        real = queries < length
        query_at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
        out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
        q = tl.load(qkv_ptr + query_at, mask=real[:, None], other=0.0)
        grad_out = tl.load(grad_out_ptr + out_at, mask=real[:, None], other=0.0)
        weights = tl.load(
            weights_ptr + pairs + queries[:, None] * width + keys[None, :], mask=real[:, None] & valid[None, :], other=0.0
        )
        grad_scores = tl.load(
            by_key_ptr + row_at[:, None] + queries[None, :], mask=valid[:, None] & real[None, :], other=0.0
        )
        grad_v += tl.dot(tl.trans(weights), grad_out)
        grad_k += tl.dot(grad_scores, q)
    for begin in range(0, length + COLUMNS - 1, ROWS):
        diagonal = begin + tl.arange(0, ROWS)
        other = diagonal[None, :] - (COLUMNS - 1) + local[:, None]
        inside = (other >= 0) & (other < length) & valid[:, None]
        grad_scores = tl.load(by_key_ptr + row_at[:, None] + other, mask=inside, other=0.0)
        after = diagonal - (first + COLUMNS - 1)
        queries = _table_rows(positions_ptr, entries_ptr, after, longest, head, 1, HIDDEN, SIZE)
        grad_k += tl.dot(grad_scores, queries)
    tl.store(grad_ptr + at, (grad_k * scale).to(grad_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(grad_ptr + at + HIDDEN, (grad_v * kept_scale).to(grad_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _table_gradients(
    qkv_ptr, by_query_ptr, by_key_ptr, sums_ptr, cu_seqlens_ptr, tokens, width, longest, scale, rows, chunk,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DISTANCES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of each distance, over a chunk of rows: (chunks, 2·L, 2·A·D)."""
    head = tl.program_id(1)
    nearest = tl.program_id(0) * DISTANCES - longest
    distances = nearest + tl.arange(0, DISTANCES)
    units = tl.arange(0, SIZE)
    grad_keys = tl.zeros((DISTANCES, SIZE), tl.float32)
    grad_queries = tl.zeros((DISTANCES, SIZE), tl.float32)
    first_row = tl.program_id(2) * chunk
    for row in range(first_row, tl.minimum(first_row + chunk, rows)):
        start = tl.load(cu_seqlens_ptr + row)
        length = tl.load(cu_seqlens_ptr + row + 1) - start
        pairs = (head * tokens + start).to(tl.int64) * width
        # Queries whose keys are at these distances before them, and keys with such queries behind them.
        for begin in range(tl.maximum(nearest, 0), tl.minimum(length, length + nearest + DISTANCES - 1), ROWS):
            queries = begin + tl.arange(0, ROWS)
            keys = queries[:, None] - distances[None, :]
            inside = (queries < length)[:, None] & (keys >= 0) & (keys < length)
            grad = tl.load(by_query_ptr + pairs + queries[:, None] * width + keys, mask=inside, other=0.0)
            at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
            q = tl.load(qkv_ptr + at, mask=(queries < length)[:, None], other=0.0)
            grad_keys += tl.dot(tl.trans(grad), q)
        for begin in range(tl.maximum(1 - nearest - DISTANCES, 0), tl.minimum(length, length - nearest), ROWS):
            keys = begin + tl.arange(0, ROWS)
            queries = keys[:, None] + distances[None, :]
            inside = (keys < length)[:, None] & (queries >= 0) & (queries < length)
            grad = tl.load(by_key_ptr + pairs + keys[:, None] * width + queries, mask=inside, other=0.0)
            at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
            k = tl.load(qkv_ptr + at, mask=(keys < length)[:, None], other=0.0)
            grad_queries += tl.dot(tl.trans(grad), k)
    at = (tl.program_id(2) * 2 * longest + distances + longest).to(tl.int64)[:, None] * (2 * HIDDEN)
    at += head * SIZE + units[None, :]
    known = (distances < longest)[:, None]
    tl.store(sums_ptr + at, grad_keys * scale, mask=known)
    tl.store(sums_ptr + at + HIDDEN, grad_queries * scale, mask=known)


@triton.jit
def _sum_distances(sums_ptr, bounds_ptr, grad_ptr, chunks, distances, width, BLOCK: tl.constexpr):
    """Of each entry of the table, over its distances and the chunks."""
    entry = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    begin = tl.load(bounds_ptr + entry)
    end = tl.load(bounds_ptr + entry + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for distance in range(begin, end):
        for chunk in range(chunks):
            at = (chunk * distances + distance) * width
            total += tl.load(sums_ptr + at + columns, mask=inside, other=0.0)
    tl.store(grad_ptr + entry * width + columns, total, mask=inside)
