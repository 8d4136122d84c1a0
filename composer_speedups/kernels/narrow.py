"""Products of a tall tensor with narrow ones, for low-rank adapters: each kernel reads the tall tensor once.

Such products are bound by memory bandwidth, and a general matmul reads the tall operand once per product. Here one
kernel computes both products of a gradient, and GELU's kernels also compute the products of its input and result.
Products have the dtype of the tall tensor. Partial sums are added in a fixed order; those of gradients are left to
:func:`.sums.totals`, which adds several of them at once.

Shapes: T tokens, C columns, F units of the feed-forward layer, R columns of the narrow tensors (at most
:data:`MAX_WIDTH`), P parts of a sum.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.float8 import Float8, note_magnitude, scale_of, settle
from composer_speedups.kernels.gelu import normal_distribution
from composer_speedups.kernels.sums import strips_and_groups

__all__ = ["MAX_WIDTH", "adapter_gradients", "gelu_backward_narrow", "gelu_narrow", "narrow_gradient"]

MAX_WIDTH = 64
# Wide tiles: each strip of columns writes its own partial products, which are as many bytes as a narrow tensor. The
# number of programs per multiprocessor is low enough for all to run at once. The 8-bit variant of GELU's gradient has
# too few registers for a wide tile of four warps, and is slower with eight.
_TILE = {"ROWS": 32, "COLUMNS": 256, "num_warps": 4}
_GELU_FORWARD_TILE = {"ROWS": 32, "COLUMNS": 128, "num_warps": 4}
_GELU_TILE, _GELU_FLOAT8_TILE = {"ROWS": 32, "COLUMNS": 128}, {"ROWS": 16, "COLUMNS": 64}
_PROGRAMS, _FLOAT8_PROGRAMS = 4, 8
_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "0")


def narrow_gradient(x_TC: Tensor, left_TR: Tensor) -> Tensor:
    """Compute partial sums of leftᵀ · x over tokens, float32 (P, R, C); both are contiguous and of one dtype."""
    tile = _tile(left_TR.shape[1])
    strips, groups = strips_and_groups(x_TC, tile["COLUMNS"], _PROGRAMS)
    gradient = _partial(x_TC, groups, left_TR, turned=False)
    _narrow[(strips, groups)](
        x_TC, left_TR, x_TC, x_TC, gradient, *x_TC.shape, RANK=left_TR.shape[1], FIRST=left_TR.shape[1], SECOND=0,
        LINEARS=1, WIDTH=_width(left_TR.shape[1]), BOTH=False, **tile,
    )  # fmt: skip
    return gradient


def adapter_gradients(dy_TO: Tensor, z_TR: Tensor, b: Tensor, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute dy · B and dyᵀ · z of the adapters of one Linear, or of three whose outputs lie side by side.

    Args:
        dy_TO: Gradient of the Linears' outputs; contiguous, as all are, and of the same dtype.
        z_TR: The adapters' inner activations, side by side.
        b: B of each adapter (outputs of its Linear, rank), one after the other in one dimension.
        ranks: Of each Linear's adapter; 0 without one.

    Returns:
        dy · B (T, R), side by side; and partial sums of dyᵀ · z over tokens, float32 (P, numbers of b), in b's order.
    """
    tokens, columns = dy_TO.shape
    width, tile = columns // len(ranks), _tile(max(ranks))
    strips = triton.cdiv(width, tile["COLUMNS"])  # per Linear
    _, groups = strips_and_groups(dy_TO, tile["COLUMNS"], _PROGRAMS)
    product = dy_TO.new_empty(strips, tokens, sum(ranks))
    gradient = dy_TO.new_empty(groups, b.numel(), dtype=torch.float32)
    _narrow[(strips * len(ranks), groups)](
        dy_TO, z_TR, b, product, gradient, tokens, width, RANK=sum(ranks), FIRST=ranks[0], SECOND=sum(ranks[1:2]),
        LINEARS=len(ranks), WIDTH=_width(max(ranks)), BOTH=True, **tile,
    )  # fmt: skip
    return product.sum(0, dtype=product.dtype), gradient  # autocast would sum to float32


def gelu_narrow(x_TF: Tensor, right_FR: Tensor, *, write: bool = True) -> tuple[Tensor | None, Tensor]:
    """Compute GELU(x) (T, F), unless ``write`` is False, and GELU(x) · right (T, R)."""
    result = torch.empty_like(x_TF) if write else None
    product = x_TF.new_empty(len(x_TF), right_FR.shape[1])
    _gelu_narrow[(triton.cdiv(len(x_TF), _GELU_FORWARD_TILE["ROWS"]),)](
        x_TF, right_FR, x_TF if result is None else result, product, *x_TF.shape, right_FR.shape[1],
        *right_FR.stride(), WIDTH=_width(right_FR.shape[1]), WRITE=write, **_GELU_FORWARD_TILE,
    )  # fmt: skip
    return result, product


def gelu_backward_narrow(
    grad_TF: Tensor,
    x_TF: Tensor,
    left_TR: Tensor | None = None,
    right_FR: Tensor | None = None,
    result_left_TR: Tensor | None = None,
    operand: Float8 | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradient of GELU, and products with it and with GELU's recomputed result, which is not written.

    Args:
        grad_TF: Gradient of GELU's result; contiguous. Overwritten with the gradient of x.
        x_TF: GELU's input; contiguous.
        left_TR, right_FR: Narrow operands for the gradient of x; both or none.
        result_left_TR: Narrow operand for GELU's result.
        operand: Also receives the gradient of x in 8 bits, settled.

    Returns:
        The gradient of x (T, F); its product with right (T, R); partial sums over tokens of its product with left,
        float32 (P, F, R), and those of result_leftᵀ · GELU(x), float32 (P, R, F). Products without operands are None.
    """
    tokens, features = x_TF.shape
    ranks = [0 if tensor is None else tensor.shape[1] for tensor in (right_FR, result_left_TR)]
    widths = {"GRAD": _width(ranks[0]), "RESULT": _width(ranks[1])}
    tile, programs = (_GELU_TILE, _PROGRAMS) if operand is None else (_GELU_FLOAT8_TILE, _FLOAT8_PROGRAMS)
    tile = {"num_warps": 4 if operand is not None or max(widths.values()) <= 16 else 8} | tile
    strips, groups = strips_and_groups(x_TF, tile["COLUMNS"], programs)
    product = gradient = result = None
    if left_TR is not None and right_FR is not None:
        product = x_TF.new_empty(strips, tokens, right_FR.shape[1])
        gradient = _partial(x_TF, groups, left_TR, turned=True)
    if result_left_TR is not None:
        result = _partial(x_TF, groups, result_left_TR, turned=False)
    given = (left_TR, right_FR, result_left_TR, product, gradient, result)
    pointers = [x_TF if tensor is None else tensor for tensor in given]
    _gelu_backward_narrow[(strips, groups)](
        grad_TF, x_TF, *pointers, *(operand or (x_TF, x_TF)), tokens, features, *ranks, **widths,
        FLOAT8=operand is not None, **tile,
    )  # fmt: skip
    if operand is not None:
        settle(operand, grad_TF)
    return grad_TF, None if product is None else product.sum(0, dtype=product.dtype), gradient, result


def _partial(x: Tensor, groups: int, left: Tensor, *, turned: bool) -> Tensor:
    columns, rank = x.shape[1], left.shape[1]
    return x.new_empty(groups, *((columns, rank) if turned else (rank, columns)), dtype=torch.float32)


def _tile(rank: int) -> dict[str, int]:
    """The tile of :func:`_narrow`. With more than 128 registers per thread, not all programs would run at a time."""
    return _TILE if rank <= 16 else _TILE | {"COLUMNS": 128}


def _width(rank: int) -> int:
    """The kernels' width for a rank: a power of two of at least 16, as tl.dot needs; 0 for 0."""
    return max(16, triton.next_power_of_2(rank)) if rank else 0


@triton.jit
def _computed_once(x):
    """Return x, which has 16 bits. Without this assembly, the compiler computes x again for each of its uses, since it
    prefers arithmetic to moving x between threads; GELU's backward kernel would have four times the instructions."""
    if _COMPILED and x.dtype != tl.float32:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _narrow(
    x_ptr, left_ptr, right_ptr, product_ptr, gradient_ptr, tokens, width,
    RANK: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, LINEARS: tl.constexpr, WIDTH: tl.constexpr,
    BOTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A strip of columns belongs to one of the Linears, each of which has ``width`` columns and ranks of its own.

    Ranks are constants, so that the narrow tensors are read in words of up to 16 bytes."""
    strips = tl.cdiv(width, COLUMNS)  # per Linear
    strip, group = tl.program_id(0) % strips, tl.program_id(1)
    linear = tl.program_id(0) // strips
    # The ranks before this Linear's, and its own.
    before = tl.where(linear == 2, FIRST + SECOND, tl.where(linear == 1, FIRST, 0))
    own = tl.where(linear == 2, RANK - FIRST - SECOND, tl.where(linear == 1, SECOND, FIRST))
    column = strip * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    narrow = tl.arange(0, WIDTH)
    used = narrow < own
    if BOTH:
        right_at = before * width + column[:, None] * own + narrow[None, :]
        right = tl.load(right_ptr + right_at, mask=inside[:, None] & used[None, :], other=0.0)
    total = tl.zeros((WIDTH, COLUMNS), tl.float32)
    last = tl.where(own > 0, tokens, 0)  # a Linear without an adapter has nothing to compute
    for start in range(group * ROWS, last, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        real = row < tokens
        at = row.to(tl.int64)[:, None] * (LINEARS * width) + linear * width + column[None, :]
        x = tl.load(x_ptr + at, mask=real[:, None] & inside[None, :], other=0.0)
        narrow_at, valid = row[:, None] * RANK + before + narrow[None, :], real[:, None] & used[None, :]
        if BOTH:
            tl.store(product_ptr + strip.to(tl.int64) * tokens * RANK + narrow_at, tl.dot(x, right), mask=valid)
        left = tl.load(left_ptr + narrow_at, mask=valid, other=0.0)
        total = tl.dot(tl.trans(left), x, total)
    if BOTH:  # in the order of right
        gradient_at = (group * RANK + before) * width + column[None, :] * own + narrow[:, None]
    else:
        gradient_at = (group * RANK + narrow)[:, None] * width + column[None, :]
    tl.store(gradient_ptr + gradient_at, total, mask=used[:, None] & inside[None, :])


@triton.jit
def _gelu_narrow(
    x_ptr, right_ptr, result_ptr, product_ptr, tokens, features, rank, right_stride, right_rank_stride,
    WIDTH: tl.constexpr, WRITE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Whole rows per program, so that their products have no parts."""
    row, narrow = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real, used = row < tokens, narrow < rank
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < features
        at, valid = row.to(tl.int64)[:, None] * features + column[None, :], real[:, None] & inside[None, :]
        x = tl.load(x_ptr + at, mask=valid, other=0.0)
        wide = x.to(tl.float32)
        below = normal_distribution(wide, tl.exp2(-0.7213475204444817 * wide * wide))
        x = _computed_once((wide * below).to(x.dtype))
        if WRITE:
            tl.store(result_ptr + at, x, mask=valid)
        right_at = column[:, None] * right_stride + narrow[None, :] * right_rank_stride
        right = tl.load(right_ptr + right_at, mask=inside[:, None] & used[None, :], other=0.0)
        total = tl.dot(x, right, total)
    tl.store(product_ptr + row[:, None] * rank + narrow[None, :], total, mask=real[:, None] & used[None, :])


@triton.jit
def _gelu_backward_narrow(
    grad_ptr, x_ptr, left_ptr, right_ptr, result_left_ptr, product_ptr, gradient_ptr, result_ptr, out8_ptr, scales_ptr,
    tokens, features, GRAD_RANK: tl.constexpr, RESULT_RANK: tl.constexpr, GRAD: tl.constexpr, RESULT: tl.constexpr,
    FLOAT8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    strip, group = tl.program_id(0), tl.program_id(1)
    column = strip * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    if GRAD > 0:
        grad_column = tl.arange(0, GRAD)
        narrow = grad_column < GRAD_RANK
        right = tl.load(
            right_ptr + column[:, None] * GRAD_RANK + grad_column[None, :], mask=inside[:, None] & narrow[None, :],
            other=0.0,
        )  # fmt: skip
        grad_total = tl.zeros((GRAD, COLUMNS), tl.float32)
    if RESULT > 0:
        result_column = tl.arange(0, RESULT)
        result_narrow = result_column < RESULT_RANK
        result_total = tl.zeros((RESULT, COLUMNS), tl.float32)
    if FLOAT8:
        scale = scale_of(scales_ptr)
        largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(group * ROWS, tokens, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        real = row < tokens
        valid = real[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * features + column[None, :]
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=valid, other=0.0).to(tl.float32)
        bell = tl.exp2(-0.7213475204444817 * x * x)  # exp(-x²/2), used for Φ and its derivative
        below = normal_distribution(x, bell)
        rounded = _computed_once((grad * (below + x * 0.3989422804014327 * bell)).to(grad_ptr.dtype.element_ty))
        tl.store(grad_ptr + at, rounded, mask=valid)
        if FLOAT8:
            wide = rounded.to(tl.float32)
            tl.store(out8_ptr + at, (wide * scale).to(out8_ptr.dtype.element_ty), mask=valid)
            largest = tl.maximum(largest, tl.abs(wide))
        if GRAD > 0:
            narrow_at = row[:, None] * GRAD_RANK + grad_column[None, :]
            left = tl.load(left_ptr + narrow_at, mask=real[:, None] & narrow[None, :], other=0.0)
            grad_total = tl.dot(tl.trans(left), rounded, grad_total)
            product_at = (strip.to(tl.int64) * tokens + row)[:, None] * GRAD_RANK + grad_column[None, :]
            tl.store(product_ptr + product_at, tl.dot(rounded, right), mask=real[:, None] & narrow[None, :])
        if RESULT > 0:
            left_at = row[:, None] * RESULT_RANK + result_column[None, :]
            result_left = tl.load(result_left_ptr + left_at, mask=real[:, None] & result_narrow[None, :], other=0.0)
            result = _computed_once((x * below).to(x_ptr.dtype.element_ty))
            result_total = tl.dot(tl.trans(result_left), result, result_total)
    if FLOAT8:
        note_magnitude(scales_ptr, group * tl.num_programs(0) + strip, tl.max(tl.max(largest, 1), 0))
    if GRAD > 0:
        tl.store(
            gradient_ptr + (group * features + column)[None, :] * GRAD_RANK + grad_column[:, None], grad_total,
            mask=narrow[:, None] & inside[None, :],
        )  # fmt: skip
    if RESULT > 0:
        tl.store(
            result_ptr + (group * RESULT_RANK + result_column)[:, None] * features + column[None, :], result_total,
            mask=result_narrow[:, None] & inside[None, :],
        )  # fmt: skip
