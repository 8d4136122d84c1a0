"""Cast several tensors with one kernel: torch's ``_foreach_copy_`` launches one per tensor if the dtypes differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["cast_together"]

_CAST = {"BLOCK": 4096, "num_warps": 4}
_MAX_TENSORS = 12


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
