"""The two kernels of attention's backward pass; see :mod:`.attention`.

One goes over the keys for each block of queries, the other over the queries for each block of keys; both compute
the weights again, and neither needs an atomic addition, so that a run repeats bit for bit.
"""

import triton
import triton.language as tl

from composer_speedups.kernels.dropout_bits import hash_bits, mix_bits, spread_bits

__all__ = ["attention_key_gradients", "attention_query_gradients"]


@triton.jit
def attention_query_gradients(
    grad_out_ptr, qkv_ptr, out_ptr, logs_ptr, delta_ptr, bits_ptr, grad_ptr, cu_seqlens_ptr, seed_ptr, tokens, scale,
    threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a block of queries; leaves what the keys' kernel needs of each, (A, T): the sum of gradient times output, and
    the random bits of its row."""
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= length:
        return
    queries = first + tl.arange(0, ROWS)
    units = tl.arange(0, SIZE)
    valid = queries < length
    seed = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    row_bits = hash_bits((start + queries).to(tl.uint32) ^ hash_bits(seed + head.to(tl.uint32)))
    at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
    out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
    q = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    grad_out = tl.load(grad_out_ptr + out_at, mask=valid[:, None], other=0.0)
    out = tl.load(out_ptr + out_at, mask=valid[:, None], other=0.0)
    logs = tl.load(logs_ptr + head * tokens + start + queries, mask=valid, other=0.0)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + head * tokens + start + queries, delta, mask=valid)
    if DROPOUT:
        tl.store(bits_ptr + head * tokens + start + queries, row_bits.to(tl.int32, bitcast=True), mask=valid)
    grad = tl.zeros((ROWS, SIZE), tl.float32)
    for begin in range(0, length, COLUMNS):
        keys = begin + tl.arange(0, COLUMNS)
        key_at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
        k = tl.load(qkv_ptr + key_at, mask=keys[:, None] < length, other=0.0)
        v = tl.load(qkv_ptr + key_at + HIDDEN, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        weights = tl.where(keys[None, :] < length, tl.exp2(scores - logs[:, None]), 0.0)
        grad_weights = tl.dot(grad_out, tl.trans(v)) * kept_scale
        if DROPOUT:
            bits = mix_bits(row_bits[:, None], spread_bits(keys)[None, :])
            grad_weights = tl.where(bits >= threshold, grad_weights, 0.0)
        grad_scores = weights * (grad_weights - delta[:, None])
        grad += tl.dot(grad_scores.to(k.dtype), k)
    tl.store(grad_ptr + at, (grad * scale).to(grad_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def attention_key_gradients(
    grad_out_ptr, qkv_ptr, logs_ptr, delta_ptr, bits_ptr, grad_ptr, cu_seqlens_ptr, tokens, scale,
    threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a block of keys and their values; its matrices have a key a row and a query a column."""
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * COLUMNS
    if first >= length:
        return
    keys = first + tl.arange(0, COLUMNS)
    units = tl.arange(0, SIZE)
    valid = keys < length
    column_bits = spread_bits(keys)
    at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
    k = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    v = tl.load(qkv_ptr + at + HIDDEN, mask=valid[:, None], other=0.0)
    grad_k = tl.zeros((COLUMNS, SIZE), tl.float32)
    grad_v = tl.zeros((COLUMNS, SIZE), tl.float32)
    for begin in range(0, length, ROWS):
        queries = begin + tl.arange(0, ROWS)
        real = queries < length
        query_at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
        out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
        q = tl.load(qkv_ptr + query_at, mask=real[:, None], other=0.0)
        grad_out = tl.load(grad_out_ptr + out_at, mask=real[:, None], other=0.0)
        logs = tl.load(logs_ptr + head * tokens + start + queries, mask=real, other=float("inf"))
        delta = tl.load(delta_ptr + head * tokens + start + queries, mask=real, other=0.0)
        scores = tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634)
        weights = tl.exp2(scores - logs[None, :])  # 0 past the end of the row
        grad_weights = tl.dot(v, tl.trans(grad_out)) * kept_scale
        kept = weights
        if DROPOUT:
            row_bits = tl.load(bits_ptr + head * tokens + start + queries, mask=real, other=0)
            row_bits = row_bits.to(tl.uint32, bitcast=True)
            keep = mix_bits(row_bits[None, :], column_bits[:, None]) >= threshold
            kept = tl.where(keep, weights, 0.0)
            grad_weights = tl.where(keep, grad_weights, 0.0)
        grad_v += tl.dot(kept.to(grad_out.dtype), grad_out)
        grad_k += tl.dot((weights * (grad_weights - delta[None, :])).to(q.dtype), q)
    tl.store(grad_ptr + at, (grad_k * scale).to(grad_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(grad_ptr + at + HIDDEN, (grad_v * kept_scale).to(grad_ptr.dtype.element_ty), mask=valid[:, None])
