"""Sum of word, position and token type embeddings, LayerNorm and dropout in one kernel, with another for the gradients.

Shapes: B rows, S slots per row, N = B·S, H units per embedding. The sum is not stored; the backward pass recomputes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.common import FirstDerivative, gradient_buffer
from composer_speedups.kernels.dropout import draw_seeds, kept, load_seed, threshold_of
from composer_speedups.kernels.norm import standardize

__all__ = ["embed", "embed_backward", "embed_forward"]

_ROWS_PER_PROGRAM = 16


def embed(
    ids_BS: Tensor,
    positions: Tensor,
    types: Tensor,
    word: Tensor,
    position: Tensor,
    token_type: Tensor,
    weight_H: Tensor,
    bias_H: Tensor,
    eps: float,
    dropout: float,
    dtype: torch.dtype,
    no_gradient: tuple[int, int],
) -> Tensor:
    """Compute dropout(LayerNorm(word[ids] + position[positions] + token_type[types])), (B, S, H), with autograd.

    Args:
        ids_BS: int64, contiguous.
        positions, types: int64, (B, S), or (1, S) for all rows.
        word, position, token_type: The tables. Their gradients are summed in float32 by atomic additions, in varying
            order.
        weight_H, bias_H, eps: Parameters of the LayerNorm.
        dropout: Dropout probability.
        dtype: Dtype of the result.
        no_gradient: The word and position whose embeddings have no gradient (``padding_idx``); -1 for none.
    """
    parameters = [p.contiguous() for p in (word, position, token_type, weight_H, bias_H)]
    buffers = [gradient_buffer(table) for table in parameters[:3]]
    return _Embed.apply(ids_BS, positions, types, *parameters, eps, dropout, dtype, no_gradient, buffers)


class _Embed(FirstDerivative):
    refusal = "the kernel of fused embeddings has no second derivative (create_graph=True); remove fused_layers"

    @staticmethod
    def forward(ctx: Any, ids: Tensor, positions: Tensor, types: Tensor, *rest: Any) -> Tensor:
        word, position, token_type, weight, bias, eps, dropout, dtype, no_gradient, buffers = rest
        (seed,) = draw_seeds(1, ids.device, dropout=dropout > 0)
        tables = (word, position, token_type)
        out, statistics = embed_forward((ids, positions, types), tables, weight, bias, eps, dropout, dtype, seed)
        ctx.save_for_backward(ids, positions, types, *tables, weight, statistics, seed)
        ctx.settings = dropout, no_gradient, buffers
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ids, positions, types, *tables, weight, statistics, seed = ctx.saved_tensors
        gradients = embed_backward(grad, (ids, positions, types), tables, weight, statistics, seed, *ctx.settings)
        wanted = [g.to(p.dtype) for g, p in zip(gradients, (*tables, weight, weight), strict=True)]
        return None, None, None, *wanted, None, None, None, None, None


def embed_forward(
    indices: Sequence[Tensor],
    tables: Sequence[Tensor],
    weight_H: Tensor,
    bias_H: Tensor,
    eps: float,
    dropout: float,
    dtype: torch.dtype,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the result, (B, S, H), and the mean and inverse standard deviation of each sum of embeddings, (2, N).

    Args:
        indices: ``ids_BS``, ``positions`` and ``types`` of :func:`embed`.
        tables: ``word``, ``position`` and ``token_type`` of :func:`embed`.
        weight_H, bias_H, eps, dropout, dtype: As in :func:`embed`.
        seed: int32 (1,), of the dropout mask.
    """
    ids, hidden = indices[0], weight_H.shape[0]
    rows, width = ids.shape
    out = torch.empty(rows, width, hidden, device=ids.device, dtype=dtype)
    statistics = torch.empty(2, rows * width, device=ids.device, dtype=torch.float32)
    _embedding_forward[(rows * width,)](
        *indices, *tables, weight_H, bias_H, out, statistics, seed,
        width, *_strides(indices), rows * width, hidden, eps, threshold_of(dropout), 1 / (1 - dropout),
        DROPOUT=dropout > 0, BLOCK=triton.next_power_of_2(hidden), num_warps=4,
    )  # fmt: skip
    return out, statistics


def embed_backward(
    grad: Tensor,
    indices: Sequence[Tensor],
    tables: Sequence[Tensor],
    weight_H: Tensor,
    statistics: Tensor,
    seed: Tensor,
    dropout: float,
    no_gradient: tuple[int, int],
    buffers: Sequence[Tensor | None] = (None, None, None),
) -> list[Tensor]:
    """Return the float32 gradients of the three tables, in their buffers if given, and of the LayerNorm's weight and
    bias."""
    (rows, width), hidden = indices[0].shape, weight_H.shape[0]
    gradients = [
        torch.zeros_like(table, dtype=torch.float32) if buffer is None else buffer.zero_()
        for table, buffer in zip(tables, buffers, strict=True)
    ]
    groups = triton.cdiv(rows, _ROWS_PER_PROGRAM)
    partial = torch.empty(groups * width, 2, hidden, device=grad.device, dtype=torch.float32)
    _embedding_backward[(width, groups)](
        grad.contiguous(), *indices, *tables, weight_H, statistics, seed,
        *gradients, partial, rows, width, *_strides(indices), rows * width, hidden, threshold_of(dropout),
        1 / (1 - dropout), *no_gradient,
        DROPOUT=dropout > 0, BLOCK=triton.next_power_of_2(hidden), ROWS=_ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return [*gradients, *partial.sum(0)]


def _strides(indices: Sequence[Tensor]) -> list[int]:
    """Return the row strides of the positions and of the types; 0 if all rows share one."""
    return [0 if x.shape[0] == 1 else x.shape[1] for x in indices[1:]]


@triton.jit
def _gathered(word_ptr, position_ptr, type_ptr, word, position, kind, hidden, columns, valid):
    total = tl.load(word_ptr + word * hidden + columns, mask=valid, other=0.0).to(tl.float32)
    total += tl.load(type_ptr + kind * hidden + columns, mask=valid, other=0.0).to(tl.float32)
    return total + tl.load(position_ptr + position * hidden + columns, mask=valid, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["positions_stride", "types_stride"])  # one kernel, compiled ahead, for all models
def _embedding_forward(
    ids_ptr, positions_ptr, types_ptr, word_ptr, position_ptr, type_ptr, weight_ptr, bias_ptr, out_ptr,
    statistics_ptr, seed_ptr, width, positions_stride, types_stride, slots, hidden, eps, threshold, scale,
    DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row, at = slot // width, slot % width
    columns = tl.arange(0, BLOCK)
    valid = columns < hidden
    word = tl.load(ids_ptr + slot)
    position = tl.load(positions_ptr + row * positions_stride + at)
    kind = tl.load(types_ptr + row * types_stride + at)
    x = _gathered(word_ptr, position_ptr, type_ptr, word, position, kind, hidden, columns, valid)
    centred, mean, inverse = standardize(x, valid, hidden, eps)
    weight = tl.load(weight_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    out = centred * inverse * weight + bias
    if DROPOUT:
        seed = load_seed(seed_ptr)
        out = tl.where(kept(seed, slot, columns, threshold), out * scale, 0.0)
    tl.store(out_ptr + slot * hidden + columns, out.to(out_ptr.dtype.element_ty), mask=valid)
    tl.store(statistics_ptr + slot, mean)
    tl.store(statistics_ptr + slots + slot, inverse)


@triton.jit(do_not_specialize=["rows", "positions_stride", "types_stride", "no_word", "no_position"])
def _embedding_backward(
    grad_ptr, ids_ptr, positions_ptr, types_ptr, word_ptr, position_ptr, type_ptr, weight_ptr, statistics_ptr,
    seed_ptr, grad_word_ptr, grad_position_ptr, grad_type_ptr, partial_ptr, rows, width, positions_stride,
    types_stride, slots, hidden, threshold, scale, no_word, no_position,
    DROPOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # A program handles the same slot of ROWS rows. Positions and types there are mostly equal, so it adds to the
    # gradients of these tables once per run of equal ones, not once per token.
    at, group = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    valid = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    seed = load_seed(seed_ptr)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    run = tl.zeros((BLOCK,), tl.float32)
    first = group * ROWS
    run_position = tl.load(positions_ptr + first * positions_stride + at)
    run_kind = tl.load(types_ptr + first * types_stride + at)
    for row in range(first, tl.minimum(first + ROWS, rows)):
        slot = row * width + at
        grad = tl.load(grad_ptr + slot * hidden + columns, mask=valid, other=0.0).to(tl.float32)
        if tl.max(tl.abs(grad), 0) > 0:  # skips padding
            word = tl.load(ids_ptr + slot)
            position = tl.load(positions_ptr + row * positions_stride + at)
            kind = tl.load(types_ptr + row * types_stride + at)
            x = _gathered(word_ptr, position_ptr, type_ptr, word, position, kind, hidden, columns, valid)
            mean = tl.load(statistics_ptr + slot)
            inverse = tl.load(statistics_ptr + slots + slot)
            normed = tl.where(valid, (x - mean) * inverse, 0.0)
            if DROPOUT:
                grad = tl.where(kept(seed, slot, columns, threshold), grad * scale, 0.0)
            sum_weight += grad * normed
            sum_bias += grad
            weighted = grad * weight
            along = tl.sum(weighted * normed, 0) / hidden
            across = tl.sum(weighted, 0) / hidden
            change = tl.where(valid, (weighted - normed * along - across) * inverse, 0.0)
            if word != no_word:
                tl.atomic_add(grad_word_ptr + word * hidden + columns, change, mask=valid, sem="relaxed")
            if (position != run_position) | (kind != run_kind):
                _add(grad_position_ptr, run_position, no_position, run, hidden, columns, valid)
                _add(grad_type_ptr, run_kind, -1, run, hidden, columns, valid)
                run_position = position
                run_kind = kind
                run = change
            else:
                run += change
    _add(grad_position_ptr, run_position, no_position, run, hidden, columns, valid)
    _add(grad_type_ptr, run_kind, -1, run, hidden, columns, valid)
    base = partial_ptr + (group * width + at) * 2 * hidden + columns
    tl.store(base, sum_weight, mask=valid)
    tl.store(base + hidden, sum_bias, mask=valid)


@triton.jit
def _add(table_ptr, row, none, values, hidden, columns, valid):
    if row != none:
        tl.atomic_add(table_ptr + row * hidden + columns, values, mask=valid, sem="relaxed")
