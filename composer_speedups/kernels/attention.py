"""Variable-length self-attention with dropout over packed queries, keys and values, for rows of up to about 512 tokens.

Queries, keys and values are one tensor, and so are their gradients, so no copies are needed between attention and the
qkv projection. Rotary positions are applied to it in place.

Shapes: T tokens, A heads, D units per head, R rows. The softmax and its sums are float32.
Source: Dao, arXiv 2307.08691, for the order of the blocks; the kernels were written for this project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.dropout import draw_seeds, mix_bits, query_bits, spread_bits, threshold_of
from composer_speedups.kernels.float8 import Float8, note_magnitude, scale_of, settle

__all__ = ["attention_backward", "attention_forward", "biased_attention", "rotate"]

# Queries (rows) and keys (columns) per block, warps, and pipeline stages: the fastest measured on an H200. With at most
# 128 registers per thread, four blocks fit on a multiprocessor; with at most 168, three; with at most 96, five.
_FORWARD = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
_QUERIES = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 168}
_KEYS = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 168}
# The same for heads of up to 32 units.
_NARROW = [(_FORWARD, {"num_stages": 3}), (_QUERIES, {"num_stages": 3, "maxnreg": 128}), (_KEYS, {"maxnreg": 96})]
assert _QUERIES["ROWS"] == _KEYS["COLUMNS"]  # the kernels share rows of partial sums
assert _QUERIES["ROWS"] == _QUERIES["COLUMNS"]  # sums over diagonals take square blocks


def attention_forward(
    qkv: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    heads: int,
    dropout: float,
    seed: Tensor,
    window: int | None = None,
    operand: Float8 | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q kᵀ / √D + bias) v for each row.

    Args:
        qkv: (T, 3·A·D), contiguous: the queries of all heads, then the keys, then the values.
        cu_seqlens: int32 (R + 1,): the start of each row, and T.
        longest: Upper bound of the row lengths.
        heads: A. D must be 16, 32, 64 or 128.
        dropout: Dropout probability of the attention weights.
        seed: int32 (1,), on the device; the same seed drops the same weights.
        window: A token attends to the tokens of its row at most this many tokens before or after it, and other pairs
            are not computed; None attends to the whole row.
        operand: Also receives the result in 8 bits, settled.
        bias: Added to the scaled scores by distance, float32 (A, 2·L + 1), contiguous, L being ``longest``: for each
            head, of distances from -L to L. A distance is the query's position minus the key's. None adds nothing.
        scale: Scale of q kᵀ; None for 1/√D.

    Returns:
        The result (T, A·D), and the base-2 logarithms of the softmax's denominators, float32 (A, T).
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    out = torch.empty(tokens, hidden, device=qkv.device, dtype=qkv.dtype)
    logs = torch.empty(heads, tokens, device=qkv.device, dtype=torch.float32)
    scale = size**-0.5 if scale is None else scale
    forward_kernel[(triton.cdiv(longest, _FORWARD["ROWS"]), heads, len(cu_seqlens) - 1)](
        qkv, cu_seqlens, out, logs, seed, *(operand or (out, seed)), _unscaled(bias, scale, logs), out, out, longest,
        tokens, scale * 1.4426950408889634, threshold_of(dropout), 1 / (1 - dropout), HIDDEN=hidden, SIZE=size,
        DROPOUT=dropout > 0, WINDOW=_window(window), FLOAT8=operand is not None, BIAS=bias is not None, WIDTH=0,
        **_options(_FORWARD, size),
    )  # fmt: skip
    if operand is not None:
        settle(operand, out)
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
    window: int | None = None,
    operand: Float8 | None = None,
    bias: Tensor | None = None,
    grad_bias: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``qkv``, (T, 3·A·D), and partial sums of it over tokens, float32 (P, 3·A·D).

    The totals of the partial sums (:func:`~.sums.totals`) are the gradient of a bias that was added to ``qkv``.

    Args:
        grad_out: Gradient of ``out``; contiguous.
        qkv, cu_seqlens, longest, dropout, seed, window, bias, scale: As in :func:`attention_forward`.
        out, logs: As returned by :func:`attention_forward`.
        operand: Also receives the gradient in 8 bits, settled.
        grad_bias: Receives the gradient of ``bias``, float32 (A, 2·L + 1); required with a bias.
    """
    tokens, hidden = out.shape
    heads = logs.shape[0]
    size = hidden // heads
    grad = torch.empty_like(qkv)
    delta = torch.empty_like(logs)
    bits = torch.empty_like(logs, dtype=torch.int32)
    scale, rows = size**-0.5 if scale is None else scale, len(cu_seqlens) - 1
    blocks = triton.cdiv(longest, _QUERIES["ROWS"])  # of queries, and as many of keys
    partial = torch.empty(rows * blocks, 3 * hidden, device=qkv.device, dtype=torch.float32)
    # each block of queries sums its scores' gradients by distance
    by_block = delta
    if bias is not None:
        by_block = torch.zeros(rows * blocks, *bias.shape, device=qkv.device, dtype=torch.float32)
    common = (_unscaled(bias, scale, logs), longest, tokens, scale, threshold_of(dropout), 1 / (1 - dropout))
    constants = {"HIDDEN": hidden, "SIZE": size, "DROPOUT": dropout > 0, "WINDOW": _window(window)}
    constants |= {"FLOAT8": operand is not None, "BIAS": bias is not None}
    written = (grad, partial, *(operand or (grad, seed)))
    _attention_query_gradients[(blocks, heads, rows)](
        grad_out, qkv, out, logs, delta, bits, *written, by_block, cu_seqlens, seed, *common,
        **constants, **_options(_QUERIES, size, limited=bias is None),
    )  # fmt: skip
    _attention_key_gradients[(blocks, heads, rows)](
        grad_out, qkv, logs, delta, bits, *written, cu_seqlens, *common, **constants,
        **_options(_KEYS, size, limited=bias is None),
    )  # fmt: skip
    if operand is not None:
        settle(operand, grad)
    if bias is not None:
        assert grad_bias is not None
        torch.sum(by_block, 0, out=grad_bias)
    return grad, partial


def _unscaled(bias: Tensor | None, scale: float, unused: Tensor) -> Tensor:
    """The bias of scores before they are scaled; any float32 tensor if there is none."""
    return unused if bias is None else bias / scale


def _options(options: dict[str, int], size: int, *, limited: bool = True) -> dict[str, int]:
    """Return a kernel's constants; wide heads, and the backward pass with a bias, need more registers than the limits
    allow."""
    if size <= 32:
        options = options | next(narrow for wide, narrow in _NARROW if wide is options)
    limited = limited and size <= 64
    return options if limited else {name: value for name, value in options.items() if name != "maxnreg"}


def _window(window: int | None) -> int:
    return -1 if window is None else window  # a compile-time constant: a model has one or two windows


@triton.jit
def _reach(first, count: tl.constexpr, length, block: tl.constexpr, WINDOW: tl.constexpr):
    """Return begin (a multiple of ``block``) and end of the keys in the windows of ``count`` tokens from ``first``."""
    begin, end = 0, length
    if WINDOW >= 0:
        begin = tl.maximum(first - WINDOW, 0) // block * block
        end = tl.minimum(first + count + WINDOW, length)
    return begin, end


@triton.jit
def forward_kernel(
    qkv_ptr, cu_seqlens_ptr, out_ptr, logs_ptr, seed_ptr, out8_ptr, scales_ptr, bias_ptr, by_query_ptr, by_key_ptr,
    longest, tokens, scale, threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr, FLOAT8: tl.constexpr,
    BIAS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``WIDTH`` is that of the scores by diagonal of disentangled attention, in square blocks; 0 for none."""
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= length:
        return
    queries = first + tl.arange(0, ROWS)
    units = tl.arange(0, SIZE)
    row_bits = query_bits(seed_ptr, head, start, queries)
    at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
    q = tl.load(qkv_ptr + at, mask=queries[:, None] < length, other=0.0)
    if WIDTH > 0:
        by_query_ptr += (head * tokens + start + first).to(tl.int64) * WIDTH
        by_key_ptr += (head * tokens + start).to(tl.int64) * WIDTH + first
        # Offset for the r-th token of a block and the s-th of another: row r, at the other token's position + ROWS - r.
        row_at = tl.arange(0, ROWS)[:, None] * (WIDTH - 1) + (tl.arange(0, COLUMNS) + ROWS)[None, :]
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, SIZE), tl.float32)
    from_key, to_key = _reach(first, ROWS, length, COLUMNS, WINDOW)
    for begin in range(from_key, to_key, COLUMNS):
        keys = begin + tl.arange(0, COLUMNS)
        key_at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
        k = tl.load(qkv_ptr + key_at, mask=keys[:, None] < length, other=0.0)
        v = tl.load(qkv_ptr + key_at + HIDDEN, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k))
        if BIAS:
            scores += _bias_of(bias_ptr, longest, head, queries[:, None], keys[None, :], length)
        if WIDTH > 0:
            by_query = tl.load(by_query_ptr + begin + row_at, mask=queries[:, None] < length, other=0.0)
            by_key = tl.load(by_key_ptr + begin * WIDTH + row_at, mask=keys[:, None] < length, other=0.0)
            scores = scores + by_query.to(tl.float32) + tl.trans(by_key).to(tl.float32)
        scores = tl.where(keys[None, :] < length, scores, float("-inf"))
        if WINDOW >= 0:
            scores = tl.where(tl.abs(queries[:, None] - keys[None, :]) <= WINDOW, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1) * scale)
        finite = higher
        if WINDOW >= 0:  # a query may have no key in its first block, and -inf - -inf is NaN
            finite = tl.where(higher > float("-inf"), higher, 0.0)
        weights = tl.exp2(scores * scale - finite[:, None])
        shrink = tl.exp2(most - finite)
        total = total * shrink + tl.sum(weights, 1)
        most = higher
        if DROPOUT:
            bits = mix_bits(row_bits[:, None], spread_bits(keys)[None, :])
            weights = tl.where(bits >= threshold, weights, 0.0)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
    out *= (kept_scale / total)[:, None]
    out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
    out = tl.where(queries[:, None] < length, out, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, out, mask=queries[:, None] < length)
    if FLOAT8:
        _store_float8(out, out8_ptr, out_at, queries[:, None] < length, scales_ptr)
    tl.store(logs_ptr + head * tokens + start + queries, most + tl.log2(total), mask=queries < length)


@triton.jit
def _bias_of(bias_ptr, longest, head, queries, keys, length):
    """Return the unscaled bias of pairs of a query and a key, 0 outside of the row."""
    at = head * (2 * longest + 1) + longest + queries - keys
    return tl.load(bias_ptr + at, mask=(queries < length) & (keys < length), other=0.0)


@triton.jit
def _store_by_distance(by_distance_ptr, distances, sums, longest):
    """Store one sum for each distance; those beyond the longest row are 0 and left out."""
    tl.store(by_distance_ptr + distances, sums, mask=tl.abs(distances) <= longest)


@triton.jit
def _store_float8(x, out8_ptr, at, valid, scales_ptr):
    """Store a block in 8 bits, and record its largest magnitude; ``x`` is 0 where it is not valid."""
    x = x.to(tl.float32)
    tl.store(out8_ptr + at, (x * scale_of(scales_ptr)).to(out8_ptr.dtype.element_ty), mask=valid)
    program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    note_magnitude(scales_ptr, program, tl.max(tl.max(tl.abs(x), 1), 0))


# The backward pass has two kernels: one loops over the keys for each block of queries, the other over the queries for
# each block of keys. Both recompute the weights. Neither needs atomic additions, so gradients are deterministic.


@triton.jit
def _attention_query_gradients(
    grad_out_ptr, qkv_ptr, out_ptr, logs_ptr, delta_ptr, bits_ptr, grad_ptr, partial_ptr, grad8_ptr, scales_ptr,
    by_block_ptr, cu_seqlens_ptr, seed_ptr, bias_ptr, longest, tokens, scale, threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr, FLOAT8: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of queries.

    For the keys' kernel, it stores the sum of gradient times output and the random bits of each query, (A, T). With a
    bias, it stores the sums of the scores' gradients by distance, (P, A, 2·L + 1) for P blocks.
    """
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * ROWS
    units = tl.arange(0, SIZE)
    partial_ptr += (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * (3 * HIDDEN) + head * SIZE
    if first >= length:
        tl.store(partial_ptr + units, tl.zeros((SIZE,), tl.float32))
        return
    queries = first + tl.arange(0, ROWS)
    valid = queries < length
    row_bits = query_bits(seed_ptr, head, start, queries)
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
    if BIAS:
        local = tl.arange(0, ROWS)
        block = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        by_block_ptr += (block * tl.num_programs(1) + head).to(tl.int64) * (2 * longest + 1) + longest
        unfinished = tl.zeros((ROWS,), tl.float32)
    from_key, to_key = _reach(first, ROWS, length, COLUMNS, WINDOW)
    for begin in range(from_key, to_key, COLUMNS):
        keys = begin + tl.arange(0, COLUMNS)
        key_at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
        k = tl.load(qkv_ptr + key_at, mask=keys[:, None] < length, other=0.0)
        v = tl.load(qkv_ptr + key_at + HIDDEN, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k))
        if BIAS:
            scores += _bias_of(bias_ptr, longest, head, queries[:, None], keys[None, :], length)
        scores *= scale * 1.4426950408889634
        weights = tl.where(keys[None, :] < length, tl.exp2(scores - logs[:, None]), 0.0)
        if WINDOW >= 0:
            weights = tl.where(tl.abs(queries[:, None] - keys[None, :]) <= WINDOW, weights, 0.0)
        grad_weights = tl.dot(grad_out, tl.trans(v)) * kept_scale
        if DROPOUT:
            bits = mix_bits(row_bits[:, None], spread_bits(keys)[None, :])
            grad_weights = tl.where(bits >= threshold, grad_weights, 0.0)
        grad_scores = (weights * (grad_weights - delta[:, None])).to(k.dtype)
        grad += tl.dot(grad_scores, k)
        if BIAS:
            # Column e of the turned block has the pairs at distance first - begin - e, and below them those at ROWS
            # more. The latter complete the distances of the former in the block of keys before.
            diagonal = local[:, None] + local[None, :]
            turned = tl.gather(grad_scores, diagonal % ROWS, 1).to(tl.float32)
            finished = unfinished + tl.sum(tl.where(diagonal >= ROWS, turned, 0.0), 0)
            unfinished = tl.sum(tl.where(diagonal < ROWS, turned, 0.0), 0)
            _store_by_distance(by_block_ptr, first - begin + ROWS - local, finished, longest)
    if BIAS:
        last = (to_key - from_key + COLUMNS - 1) // COLUMNS * COLUMNS + from_key - COLUMNS  # the last block of keys
        _store_by_distance(by_block_ptr, first - last - local, unfinished, longest)
    _store_gradient(grad * scale, grad_ptr, partial_ptr + units, grad8_ptr, at, valid, scales_ptr, FLOAT8)


@triton.jit
def _store_gradient(grad, grad_ptr, partial_ptr, grad8_ptr, at, valid, scales_ptr, FLOAT8: tl.constexpr):
    """Store a block's gradient, its sum over tokens, and with FLOAT8 its 8-bit copy."""
    grad = tl.where(valid[:, None], grad, 0.0)
    tl.store(partial_ptr, tl.sum(grad, 0))
    grad = grad.to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + at, grad, mask=valid[:, None])
    if FLOAT8:
        _store_float8(grad, grad8_ptr, at, valid[:, None], scales_ptr)


@triton.jit
def _attention_key_gradients(
    grad_out_ptr, qkv_ptr, logs_ptr, delta_ptr, bits_ptr, grad_ptr, partial_ptr, grad8_ptr, scales_ptr,
    cu_seqlens_ptr, bias_ptr, longest, tokens, scale, threshold, kept_scale,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr, FLOAT8: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values; matrices have a row per key and a column per query."""
    head = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - start
    first = tl.program_id(0) * COLUMNS
    units = tl.arange(0, SIZE)
    partial_ptr += (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * (3 * HIDDEN) + HIDDEN + head * SIZE
    if first >= length:
        tl.store(partial_ptr + units, tl.zeros((SIZE,), tl.float32))
        tl.store(partial_ptr + HIDDEN + units, tl.zeros((SIZE,), tl.float32))
        return
    keys = first + tl.arange(0, COLUMNS)
    valid = keys < length
    column_bits = spread_bits(keys)
    at = (start + keys).to(tl.int64)[:, None] * (3 * HIDDEN) + HIDDEN + head * SIZE + units[None, :]
    k = tl.load(qkv_ptr + at, mask=valid[:, None], other=0.0)
    v = tl.load(qkv_ptr + at + HIDDEN, mask=valid[:, None], other=0.0)
    grad_k = tl.zeros((COLUMNS, SIZE), tl.float32)
    grad_v = tl.zeros((COLUMNS, SIZE), tl.float32)
    from_query, to_query = _reach(first, COLUMNS, length, ROWS, WINDOW)
    for begin in range(from_query, to_query, ROWS):
        queries = begin + tl.arange(0, ROWS)
        real = queries < length
        query_at = (start + queries).to(tl.int64)[:, None] * (3 * HIDDEN) + head * SIZE + units[None, :]
        out_at = (start + queries).to(tl.int64)[:, None] * HIDDEN + head * SIZE + units[None, :]
        q = tl.load(qkv_ptr + query_at, mask=real[:, None], other=0.0)
        grad_out = tl.load(grad_out_ptr + out_at, mask=real[:, None], other=0.0)
        logs = tl.load(logs_ptr + head * tokens + start + queries, mask=real, other=float("inf"))
        delta = tl.load(delta_ptr + head * tokens + start + queries, mask=real, other=0.0)
        scores = tl.dot(k, tl.trans(q))
        if BIAS:
            scores += _bias_of(bias_ptr, longest, head, queries[None, :], keys[:, None], length)
        scores *= scale * 1.4426950408889634
        weights = tl.exp2(scores - logs[None, :])  # 0 past the end of the row
        if WINDOW >= 0:
            weights = tl.where(tl.abs(queries[None, :] - keys[:, None]) <= WINDOW, weights, 0.0)
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
    _store_gradient(grad_k * scale, grad_ptr, partial_ptr + units, grad8_ptr, at, valid, scales_ptr, FLOAT8)
    at += HIDDEN
    partial_ptr += HIDDEN
    _store_gradient(grad_v * kept_scale, grad_ptr, partial_ptr + units, grad8_ptr, at, valid, scales_ptr, FLOAT8)


def biased_attention(
    qkv: Tensor, bias: Tensor, cu_seqlens: Tensor, longest: int, heads: int, dropout: float, scale: float | None = None
) -> Tensor:
    """Compute softmax(scale · q kᵀ + bias) v for each row, (T, A·D), as a custom operator with autograd.

    It is opaque to ``torch.compile``, and has gradients of ``qkv`` and ``bias``.

    Args:
        qkv, cu_seqlens, longest, heads, dropout, scale: As in :func:`attention_forward`.
        bias: As there, float32 (A, 2·L + 1).
    """
    (seed,) = draw_seeds(1, qkv.device, dropout=dropout > 0)
    scale = (qkv.shape[1] // 3 // heads) ** -0.5 if scale is None else scale
    out, _ = _biased(qkv, bias, cu_seqlens, longest, heads, dropout, scale, seed)
    return out


def _biased_forward(
    qkv: Tensor, bias: Tensor, cu: Tensor, longest: int, heads: int, dropout: float, scale: float, seed: Tensor
) -> tuple[Tensor, Tensor]:
    return attention_forward(qkv, cu, longest, heads, dropout, seed, bias=bias, scale=scale)


def _biased_gradients(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor,
    out: Tensor,
    logs: Tensor,
    cu: Tensor,
    longest: int,
    dropout: float,
    scale: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    grad_bias = torch.empty_like(bias)
    inputs = grad_out.contiguous(), qkv, out, logs, cu, longest, dropout, seed
    grad, _ = attention_backward(*inputs, bias=bias, grad_bias=grad_bias, scale=scale)
    return grad, grad_bias


def attention_operator(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], given: str, settings: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a custom operator with autograd, opaque to ``torch.compile``, of the two passes of a kind of attention.

    ``forward`` takes qkv, the tensors ``given``, cu_seqlens, longest, heads, the ``settings`` and a seed. ``backward``
    takes the result's gradient, qkv, ``given``, what ``forward`` returned, cu_seqlens, longest, ``settings`` and seed,
    and returns the gradients of qkv and of the first of ``given``, float32. ``given`` and ``settings`` are written as
    in torch's schemas: annotations are strings in these files, from which not every release of torch infers schemas.
    """
    rows, tensors = "Tensor cu_seqlens, SymInt longest", 1 + given.count("Tensor")  # with qkv
    operator = torch.library.custom_op(
        f"composer_speedups::{name}",
        forward,
        mutates_args=(),
        schema=f"(Tensor qkv, {given}, {rows}, int heads, {settings}, Tensor seed) -> (Tensor, Tensor)",
    )
    gradients = torch.library.custom_op(
        f"composer_speedups::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor grad_out, Tensor qkv, {given}, Tensor out, Tensor logs, {rows}, {settings}, Tensor seed) "
        "-> (Tensor, Tensor)",
    )

    @operator.register_fake
    def _(qkv: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        tokens, width = qkv.shape
        return qkv.new_empty(tokens, width // 3), qkv.new_empty(others[tensors + 1], tokens, dtype=torch.float32)

    @gradients.register_fake
    def _(_: Tensor, qkv: Tensor, first: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(qkv), torch.empty_like(first, dtype=torch.float32)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:tensors], *output, inputs[tensors], inputs[-1])
        ctx.settings = inputs[tensors + 1], *inputs[tensors + 3 : -1]  # without heads
        ctx.others = len(inputs) - 2

    def differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *saved, seed = ctx.saved_tensors
        grad, grad_first = gradients(grad_out, *saved, *ctx.settings, seed)
        return grad, grad_first.to(saved[1].dtype), *[None] * ctx.others

    operator.register_autograd(differentiate, setup_context=setup_context)
    return operator


_biased = attention_operator(
    "biased_attention", _biased_forward, _biased_gradients, "Tensor bias", "float dropout, float scale"
)


def rotate(qkv: Tensor, cos_TD: Tensor, sin_TD: Tensor, heads: int, *, back: bool = False) -> None:
    """Rotate queries and keys by the angles of their tokens, in place.

    Args:
        qkv: (T, 3·A·D), contiguous: the queries of all heads, then the keys, then the values. Queries and keys are
            overwritten.
        cos_TD, sin_TD: Cosines and sines of the angles, contiguous; both halves of a row are equal.
        heads: A. D must be a power of two.
        back: Rotate by the negative angles, which computes the gradient.

    Source: Su et al., arXiv 2104.09864; pairs are formed of a head's two halves, as in transformers.
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
