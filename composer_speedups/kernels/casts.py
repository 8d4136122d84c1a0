"""Cast several tensors with one kernel, or a layer's weights and add low-rank adapters to them on the way.

torch's ``_foreach_copy_`` launches one kernel per tensor if the dtypes differ; ``torch.addmm`` and a cast move almost
four times as many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.common import FirstDerivative

__all__ = ["cast_parameters", "cast_together", "merged_weights"]

_CAST = {"BLOCK": 4096, "num_warps": 4}
_MAX_TENSORS = 12
_MERGE = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4}


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of the tensors in ``dtype``, one after the other in one buffer.

    Args:
        tensors: Up to twelve tensors on one device.
    """
    tensors = [x.contiguous() for x in tensors]
    numbers = [x.numel() for x in tensors]
    out = torch.empty(sum(numbers), device=tensors[0].device, dtype=dtype)
    unused = _MAX_TENSORS - len(tensors)
    _cast_together[(sum(triton.cdiv(n, _CAST["BLOCK"]) for n in numbers),)](
        *tensors, *[out] * unused, out, *numbers, *[0] * unused, **_CAST
    )
    return [copy.view_as(x) for copy, x in zip(out.split(numbers), tensors, strict=True)]


def cast_parameters(parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """:func:`cast_together` of up to twelve float32 parameters, with gradients, which one more kernel casts back."""
    return _Cast.apply(dtype, *parameters)  # type: ignore[no-any-return]


class _Cast(FirstDerivative):
    refusal = "fused_layers has no second derivative (create_graph=True); remove fused_layers"

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(cast_together(parameters, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        given = [gradient for gradient in gradients if gradient is not None]
        copies = iter(cast_together(given, torch.float32) if given else ())
        return (None, *(None if gradient is None else next(copies) for gradient in gradients))


@triton.jit
def _cast_together(
    ptr0, ptr1, ptr2, ptr3, ptr4, ptr5, ptr6, ptr7, ptr8, ptr9, ptr10, ptr11, out_ptr,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)  # blocks are numbered tensor after tensor
    block, out_ptr = _cast_block(ptr0, out_ptr, block, n0, BLOCK)
    block, out_ptr = _cast_block(ptr1, out_ptr, block, n1, BLOCK)
    block, out_ptr = _cast_block(ptr2, out_ptr, block, n2, BLOCK)
    block, out_ptr = _cast_block(ptr3, out_ptr, block, n3, BLOCK)
    block, out_ptr = _cast_block(ptr4, out_ptr, block, n4, BLOCK)
    block, out_ptr = _cast_block(ptr5, out_ptr, block, n5, BLOCK)
    block, out_ptr = _cast_block(ptr6, out_ptr, block, n6, BLOCK)
    block, out_ptr = _cast_block(ptr7, out_ptr, block, n7, BLOCK)
    block, out_ptr = _cast_block(ptr8, out_ptr, block, n8, BLOCK)
    block, out_ptr = _cast_block(ptr9, out_ptr, block, n9, BLOCK)
    block, out_ptr = _cast_block(ptr10, out_ptr, block, n10, BLOCK)
    _cast_block(ptr11, out_ptr, block, n11, BLOCK)


@triton.jit
def _cast_block(x_ptr, out_ptr, block, numbers, BLOCK: tl.constexpr):
    """Cast block number ``block`` of a tensor, if it has one; return the number and target relative to the next."""
    blocks = tl.cdiv(numbers, BLOCK)
    if (block >= 0) & (block < blocks):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < numbers, other=0.0)
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < numbers)
    return block - blocks, out_ptr + numbers


def merged_weights(
    weights: Sequence[Tensor], adapters: Sequence[tuple[Tensor, Tensor, float] | None], dtype: torch.dtype
) -> list[Tensor]:
    """Return weight + scale · B · A of each Linear in ``dtype``, one after the other in one buffer.

    The sum is computed in float32, and rounded once.

    Args:
        weights: Weights (O, I) of query, key, value and attention's output (H, H), and of the feed-forward layer (F, H)
            and (H, F).
        adapters: A (R, I), B (O, R) and the scale for each weight. None adds nothing.
    """
    weights = [weight.contiguous() for weight in weights]
    hidden, inner = weights[4].shape[1], weights[4].shape[0]
    out = torch.empty(sum(weight.numel() for weight in weights), device=weights[0].device, dtype=dtype)
    given = [adapter or (weight, weight, 0.0) for weight, adapter in zip(weights, adapters, strict=True)]
    of_a, of_b = [a.contiguous() for a, _, _ in given], [b.contiguous() for _, b, _ in given]
    scales = [scale for _, _, scale in given]
    ranks = [0 if adapter is None else len(adapter[0]) for adapter in adapters]
    tiles = [triton.cdiv(len(w), _MERGE["ROWS"]) * triton.cdiv(w.shape[1], _MERGE["COLUMNS"]) for w in weights]
    _merge_together[(sum(tiles),)](*weights, *of_a, *of_b, out, *ranks, *scales, hidden, inner, **_MERGE)
    sizes = [weight.numel() for weight in weights]
    return [merged.view_as(weight) for merged, weight in zip(out.split(sizes), weights, strict=True)]


@triton.jit(do_not_specialize=["rank0", "rank1", "rank2", "rank3", "rank4", "rank5"])
def _merge_together(
    weight0, weight1, weight2, weight3, weight4, weight5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5, out_ptr,
    rank0, rank1, rank2, rank3, rank4, rank5, scale0, scale1, scale2, scale3, scale4, scale5, hidden, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)  # tiles are numbered weight after weight
    square = tl.cdiv(hidden, ROWS) * tl.cdiv(hidden, COLUMNS)
    before_down = 4 * square + tl.cdiv(inner, ROWS) * tl.cdiv(hidden, COLUMNS)
    numbers = hidden * hidden
    if tile < square:
        _merge_tile(weight0, a0, b0, out_ptr, tile, hidden, hidden, rank0, scale0, ROWS, COLUMNS)
    elif tile < 2 * square:
        at = out_ptr + numbers
        _merge_tile(weight1, a1, b1, at, tile - square, hidden, hidden, rank1, scale1, ROWS, COLUMNS)
    elif tile < 3 * square:
        at = out_ptr + 2 * numbers
        _merge_tile(weight2, a2, b2, at, tile - 2 * square, hidden, hidden, rank2, scale2, ROWS, COLUMNS)
    elif tile < 4 * square:
        at = out_ptr + 3 * numbers
        _merge_tile(weight3, a3, b3, at, tile - 3 * square, hidden, hidden, rank3, scale3, ROWS, COLUMNS)
    elif tile < before_down:
        at = out_ptr + 4 * numbers
        _merge_tile(weight4, a4, b4, at, tile - 4 * square, inner, hidden, rank4, scale4, ROWS, COLUMNS)
    else:
        at = out_ptr + 4 * numbers + inner * hidden
        _merge_tile(weight5, a5, b5, at, tile - before_down, hidden, inner, rank5, scale5, ROWS, COLUMNS)


@triton.jit
def _merge_tile(
    weight_ptr, a_ptr, b_ptr, out_ptr, tile, rows, columns, rank, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    inside, real = column < columns, row < rows
    at, valid = row[:, None] * columns + column[None, :], real[:, None] & inside[None, :]
    weight = tl.load(weight_ptr + at, mask=valid, other=0.0).to(tl.float32)  # first: it comes from the slowest memory
    added = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(rank):
        b = tl.load(b_ptr + row * rank + i, mask=real, other=0.0).to(tl.float32)
        added += b[:, None] * tl.load(a_ptr + i * columns + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + at, (weight + scale * added).to(out_ptr.dtype.element_ty), mask=valid)
