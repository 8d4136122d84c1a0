"""8-bit operands of matmuls: casts with one scale per tensor, which follows the tensor's largest magnitude.

The scale comes from the previous pass, so the kernel that computes a tensor can also write its 8-bit copy, and it
records the largest magnitude. If that does not fit the scale, :func:`settle` casts the tensor again. Hence no number is
ever clipped, the first pass is not a special case, and nothing synchronizes with the device. Scales are powers of two,
so changing the scale changes only which numbers underflow.

Each operand has a row of 64 int32 numbers, most of which are the bits of a float32 (:func:`new_scales`)::

    0       scale, the factor of a number before it is cast
    4       1/scale of the current operand, a factor of the matmul's result; NaN if the operand has inf or NaN
    8 … 63  partial maxima of the magnitudes, from different programs; stored as integers, because positive floats have
            the same order as their bits

Shapes: T tokens, H hidden units, F units of the feed-forward layer, O outputs and I inputs of a matmul.
Source: Micikevicius et al., arXiv 2209.05433, for the formats; delayed scaling as in NVIDIA's Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.sums import multiprocessors

__all__ = [
    "ACTIVATION",
    "GRADIENT",
    "Float8",
    "begin_scales",
    "cast_float8",
    "cast_weights",
    "new_scales",
    "scaled_product",
    "settle",
]

ACTIVATION, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2

_HEADER, _ROW = tl.constexpr(8), tl.constexpr(64)
_BLOCK = 8192  # numbers per program of the casts
_TILE = 64  # rows and columns of a weight per program of the casts
_TRANSPOSE_TILE = 128  # rows and columns of a weight per program of the transposition

# For each format: its largest number; the headroom, in powers of two, that a new scale leaves above the largest
# magnitude; and the maximum headroom before the numbers are cast again. Gradients vary most between steps, so they have
# the most room, which e5m2's range allows.
_MAX_VALUE = {ACTIVATION: 448.0, GRADIENT: 57344.0}
_HEADROOM = {ACTIVATION: 1, GRADIENT: 4}
_MAX_SLACK = {ACTIVATION: 5, GRADIENT: 12}


class Float8(NamedTuple):
    """An 8-bit operand, or the memory for one that a kernel will write.

    Attributes:
        values: The numbers times their scale, e4m3 or e5m2.
        scales: The operand's row of :func:`new_scales`.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def like(cls, x: Tensor, dtype: torch.dtype, scales: Tensor) -> Float8:
        """Allocate an operand with the shape of ``x``."""
        return cls(torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format), scales)


def new_scales(operands: int, device: torch.device | None = None) -> Tensor:
    """Return a row for each operand, int32 (operands, 64), with scales of 1."""
    scales = torch.zeros(operands, _ROW.value, dtype=torch.int32, device=device)
    scales.view(torch.float32)[:, 0] = 1.0
    return scales


def begin_scales(scales: Tensor, gradients: int, *, keep: bool) -> Tensor:
    """Compute scales for the next pass from the magnitudes recorded in the last one.

    An operand keeps its scale if no magnitude was recorded, or one that is inf or NaN.

    Args:
        scales: (operands, 64); the last ``gradients`` rows are of e5m2 operands, the others of e4m3 operands.
        gradients: Number of operands that are gradients.
        keep: Overwrite ``scales``. Otherwise new rows are returned, and ``scales`` does not see the pass's magnitudes.

    Returns:
        The rows for the pass.
    """
    begun = scales if keep else torch.empty_like(scales)
    activations = len(scales) - gradients
    _begin_scales[(len(scales),)](
        scales, begun, activations, *targets_of(ACTIVATION), *targets_of(GRADIENT), num_warps=1
    )
    return begun


def cast_float8(x: Tensor, scales: Tensor, dtype: torch.dtype = ACTIVATION) -> Float8:
    """Cast a contiguous tensor to a settled operand."""
    operand = Float8.like(x, dtype, scales)
    _cast[(triton.cdiv(x.numel(), _BLOCK),)](x, operand.values, scales, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return settle(operand, x)


def settle(operand: Float8, x: Tensor) -> Float8:
    """Finish an operand that a kernel has written: cast it again if its scale did not fit, and store 1/scale.

    Args:
        operand: An operand written by a kernel that recorded its magnitudes.
        x: The same numbers in 16 or 32 bits, contiguous.
    """
    programs = triton.cdiv(x.numel(), _BLOCK)
    if x.is_cuda:
        programs = min(programs, 2 * multiprocessors(x))
    _settle[(programs,)](
        x, operand.values, operand.scales, x.numel(), *targets_of(operand.values.dtype), BLOCK=_BLOCK // 4, num_warps=4
    )
    return operand


def cast_weights(weights: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[list[Float8], list[Float8]]:
    """Cast the weights of a layer's four matmuls and their transposes to e4m3, all weights in the same kernels.

    Args:
        weights: Weights of query, key, value and attention's output (H, H), and of the feed-forward layer (F, H) and
            (H, F); of the same floating dtype. H and F are multiples of 16.
        scales: A row for each of the four matmuls.

    Returns:
        The weight (O, I) of each matmul, with query, key and value as one, and their transposes (I, O).
    """
    weights = [weight.contiguous() for weight in weights]
    query, up = weights[0], weights[4]
    hidden, inner = query.shape[0], up.shape[0]
    shapes = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
    casts = [Float8(query.new_empty(o, i, dtype=ACTIVATION), s) for (o, i), s in zip(shapes, scales, strict=True)]
    transposes = [Float8(query.new_empty(i, o, dtype=ACTIVATION), s) for (o, i), s in zip(shapes, scales, strict=True)]
    squares, across = triton.cdiv(hidden, _TILE), triton.cdiv(inner, _TILE)
    for again in (False, True):
        _cast_weights[(4 * squares * squares + 2 * squares * across,)](
            *weights, *(weight.values for weight in casts), *scales, hidden, inner, *targets_of(ACTIVATION),
            AGAIN=again, TILE=_TILE, num_warps=4,
        )  # fmt: skip
    tiles = [triton.cdiv(o, _TRANSPOSE_TILE) * triton.cdiv(i, _TRANSPOSE_TILE) for o, i in shapes]
    words = [o.values.view(torch.int32) for pair in zip(casts, transposes, strict=True) for o in pair]
    _turn_weights[(sum(tiles),)](*words, hidden, inner, TILE=_TRANSPOSE_TILE, num_warps=4)
    return casts, transposes


def scaled_product(x_TI: Float8, weight_OI: Float8, dtype: torch.dtype, bias_O: Tensor | None = None) -> Tensor:
    """Compute x · weightᵀ + bias, (T, O), with sums of fewer bits, which is up to a fifth faster on Hopper.

    Args:
        x_TI: Settled; e4m3, or e5m2 if ``weight_OI`` is e4m3. I and O are multiples of 16.
        weight_OI: Settled.
        dtype: Dtype of the result and of ``bias_O``.
    """
    return torch._scaled_mm(
        x_TI.values, weight_OI.values.t(), scale_a=_inverse(x_TI), scale_b=_inverse(weight_OI), bias=bias_O,
        out_dtype=dtype, use_fast_accum=True,
    )  # fmt: skip


def _inverse(operand: Float8) -> Tensor:
    return operand.scales[4].view(torch.float32)


def targets_of(dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the format's largest number, a new scale's target for the largest magnitude, and the least that fits."""
    most = _MAX_VALUE[dtype]
    return most, most * 2.0 ** -_HEADROOM[dtype], most * 2.0 ** -_MAX_SLACK[dtype]


@triton.jit
def scale_of(scales_ptr):
    return tl.load(scales_ptr).to(tl.float32, bitcast=True)


@triton.jit
def note_magnitude(scales_ptr, program, magnitude):
    """Record the largest magnitude of a program's numbers, a float32 of at least 0."""
    at = _HEADER + program % (_ROW - _HEADER)
    tl.atomic_max(scales_ptr + at, magnitude.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def noted_magnitude(scales_ptr):
    columns = tl.arange(0, _ROW)
    bits = tl.load(scales_ptr + columns, mask=columns >= _HEADER, other=0)
    return tl.max(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _fitting(magnitude, target):
    """Return the largest power of two whose product with the magnitude is at most the target."""
    ratio = tl.minimum(target / magnitude, 1.0e36)
    return (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _fits(magnitude, scale, most, least):
    """Return whether a scale fits; any scale fits zeros, inf and NaN, for which another one would not be better."""
    scaled = magnitude * scale
    finite = magnitude < float("inf")
    return (magnitude == 0) | (finite == 0) | ((scaled <= most) & (scaled >= least))


@triton.jit
def settled_scale(scales_ptr, magnitude, most, target, least, first):
    """Return an operand's final scale; the first program stores its inverse."""
    scale = scale_of(scales_ptr)
    if _fits(magnitude, scale, most, least) == 0:
        scale = _fitting(magnitude, target)
    if first:
        inverse = tl.where(magnitude < float("inf"), 1 / scale, float("nan"))
        tl.store(scales_ptr + 4, inverse.to(tl.int32, bitcast=True))
    return scale


@triton.jit
def _begin_scales(
    scales_ptr, begun_ptr, activations, most, target, least, most_gradient, target_gradient, least_gradient
):
    operand = tl.program_id(0)
    scales_ptr += operand * _ROW
    begun_ptr += operand * _ROW
    magnitude = noted_magnitude(scales_ptr)
    scale = scale_of(scales_ptr)
    if (magnitude > 0) & (magnitude < float("inf")):
        scale = _fitting(magnitude, tl.where(operand < activations, target, target_gradient))
    columns = tl.arange(0, _ROW)
    tl.store(begun_ptr + columns, tl.where(columns == 0, scale.to(tl.int32, bitcast=True), 0))


@triton.jit
def _cast(x_ptr, out_ptr, scales_ptr, numbers, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numbers, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * scale_of(scales_ptr)).to(out_ptr.dtype.element_ty), mask=at < numbers)
    note_magnitude(scales_ptr, program, tl.max(tl.abs(x), 0))


@triton.jit
def _settle(x_ptr, out_ptr, scales_ptr, numbers, most, target, least, BLOCK: tl.constexpr):
    magnitude = noted_magnitude(scales_ptr)
    before = scale_of(scales_ptr)
    scale = settled_scale(scales_ptr, magnitude, most, target, least, tl.program_id(0) == 0)
    if scale != before:
        for start in range(tl.program_id(0) * BLOCK, numbers, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < numbers).to(tl.float32)
            tl.store(out_ptr + at, (x * scale).to(out_ptr.dtype.element_ty), mask=at < numbers)


@triton.jit
def _cast_weights(
    query_ptr, key_ptr, value_ptr, out_ptr, up_ptr, down_ptr, qkv8_ptr, out8_ptr, up8_ptr, down8_ptr,
    qkv_scales_ptr, out_scales_ptr, up_scales_ptr, down_scales_ptr, hidden, inner, most, target, least,
    AGAIN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    squares = tl.cdiv(hidden, TILE)
    square, wide = squares * squares, squares * tl.cdiv(inner, TILE)
    tile = tl.program_id(0)
    if tile < square:
        _cast_tile(query_ptr, qkv8_ptr, qkv_scales_ptr, tile, hidden, hidden, 0, most, target, least, AGAIN, TILE)
    elif tile < 2 * square:
        tile -= square
        _cast_tile(key_ptr, qkv8_ptr, qkv_scales_ptr, tile, hidden, hidden, 1, most, target, least, AGAIN, TILE)
    elif tile < 3 * square:
        tile -= 2 * square
        _cast_tile(value_ptr, qkv8_ptr, qkv_scales_ptr, tile, hidden, hidden, 2, most, target, least, AGAIN, TILE)
    elif tile < 4 * square:
        tile -= 3 * square
        _cast_tile(out_ptr, out8_ptr, out_scales_ptr, tile, hidden, hidden, 0, most, target, least, AGAIN, TILE)
    elif tile < 4 * square + wide:
        tile -= 4 * square
        _cast_tile(up_ptr, up8_ptr, up_scales_ptr, tile, inner, hidden, 0, most, target, least, AGAIN, TILE)
    else:
        tile -= 4 * square + wide
        _cast_tile(down_ptr, down8_ptr, down_scales_ptr, tile, hidden, inner, 0, most, target, least, AGAIN, TILE)


@triton.jit
def _cast_tile(
    weight_ptr, out_ptr, scales_ptr, tile, rows, columns, third, most, target, least,
    AGAIN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast a tile of a weight (rows, columns), which is the first, second or third weight of its matmul."""
    across = tl.cdiv(columns, TILE)
    row = (tile // across) * TILE + tl.arange(0, TILE)
    column = (tile % across) * TILE + tl.arange(0, TILE)
    at = row[:, None] * columns + column[None, :]
    valid = (row < rows)[:, None] & (column < columns)[None, :]
    scale = scale_of(scales_ptr)
    cast = True
    if AGAIN:
        before, first = scale, (tile == 0) & (third == 0)
        scale = settled_scale(scales_ptr, noted_magnitude(scales_ptr), most, target, least, first)
        cast = scale != before
    if cast:
        weight = tl.load(weight_ptr + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(out_ptr + third * rows * columns + at, (weight * scale).to(out_ptr.dtype.element_ty), mask=valid)
        if not AGAIN:
            note_magnitude(scales_ptr, tl.program_id(0), tl.max(tl.max(tl.abs(weight), 1), 0))


@triton.jit
def _turn_weights(
    qkv_ptr, qkv_turned_ptr, out_ptr, out_turned_ptr, up_ptr, up_turned_ptr, down_ptr, down_turned_ptr,
    hidden, inner, TILE: tl.constexpr,
):  # fmt: skip
    squares = tl.cdiv(hidden, TILE)
    three, one, wide = tl.cdiv(3 * hidden, TILE) * squares, squares * squares, squares * tl.cdiv(inner, TILE)
    tile = tl.program_id(0)
    if tile < three:
        _turn_tile(qkv_ptr, qkv_turned_ptr, tile, 3 * hidden, hidden, TILE)
    elif tile < three + one:
        _turn_tile(out_ptr, out_turned_ptr, tile - three, hidden, hidden, TILE)
    elif tile < three + one + wide:
        _turn_tile(up_ptr, up_turned_ptr, tile - three - one, inner, hidden, TILE)
    else:
        _turn_tile(down_ptr, down_turned_ptr, tile - three - one - wide, hidden, inner, TILE)


@triton.jit
def _turn_tile(x_ptr, out_ptr, tile, rows, columns, TILE: tl.constexpr):
    """Transpose a tile of bytes (rows, columns), reading four columns per int32 and writing four rows per int32."""
    across = tl.cdiv(columns, TILE)
    four = (tile // across) * (TILE // 4) + tl.arange(0, TILE // 4)  # rows
    word = (tile % across) * (TILE // 4) + tl.arange(0, TILE // 4)  # columns
    valid = (4 * four < rows)[:, None] & (4 * word < columns)[None, :]
    inside = (4 * word < columns)[:, None] & (4 * four < rows)[None, :]
    at = 4 * four[:, None] * (columns // 4) + word[None, :]
    first = tl.load(x_ptr + at, mask=valid, other=0)
    second = tl.load(x_ptr + at + columns // 4, mask=valid, other=0)
    third = tl.load(x_ptr + at + 2 * (columns // 4), mask=valid, other=0)
    fourth = tl.load(x_ptr + at + 3 * (columns // 4), mask=valid, other=0)
    for i in tl.static_range(4):
        turned = (first >> 8 * i) & 255
        turned |= ((second >> 8 * i) & 255) << 8
        turned |= ((third >> 8 * i) & 255) << 16
        turned |= ((fourth >> 8 * i) & 255) << 24
        out_at = (4 * word + i)[:, None] * (rows // 4) + four[None, :]
        tl.store(out_ptr + out_at, tl.trans(turned), mask=inside)
