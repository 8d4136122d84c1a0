"""GeGLU with dropout, forward and backward: the GELU of a projection's first half times its second half.

Shapes: T tokens, F units of the feed-forward layer.
Source: Shazeer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_speedups.kernels.dropout import kept, load_seed, threshold_of
from composer_speedups.kernels.gelu import normal_distribution

__all__ = ["geglu_backward", "geglu_forward"]

_COLUMNS = 512


def geglu_forward(x_TF2: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """Compute dropout(GELU(first half) · second half), (T, F), with the exact GELU.

    Args:
        x_TF2: (T, 2·F), contiguous.
        dropout: Dropout probability of the result.
        seed: int32 (1,), on the device; the same seed gives the same mask.
    """
    tokens, inner = x_TF2.shape[0], x_TF2.shape[1] // 2
    out = torch.empty(tokens, inner, device=x_TF2.device, dtype=x_TF2.dtype)
    _geglu_forward[(tokens, triton.cdiv(inner, _COLUMNS))](
        x_TF2, out, seed, inner, threshold_of(dropout), 1 / (1 - dropout),
        DROPOUT=dropout > 0, COLUMNS=_COLUMNS, num_warps=2,
    )  # fmt: skip
    return out


def geglu_backward(grad_TF: Tensor, x_TF2: Tensor, dropout: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of :func:`geglu_forward`'s input, (T, 2·F), and its recomputed result, (T, F).

    Args:
        grad_TF: Gradient of the result; contiguous. Overwritten with the recomputed result.
        x_TF2, dropout, seed: As in the forward pass.
    """
    tokens, inner = grad_TF.shape
    grad_x = torch.empty_like(x_TF2)
    _geglu_backward[(tokens, triton.cdiv(inner, _COLUMNS))](
        grad_TF, x_TF2, grad_x, seed, inner, threshold_of(dropout), 1 / (1 - dropout),
        DROPOUT=dropout > 0, COLUMNS=_COLUMNS, num_warps=2,
    )  # fmt: skip
    return grad_x, grad_TF


@triton.jit
def _geglu_forward(x_ptr, out_ptr, seed_ptr, inner, threshold, scale, DROPOUT: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = columns < inner
    at = row.to(tl.int64) * 2 * inner + columns
    x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + at + inner, mask=valid, other=0.0).to(tl.float32)
    out = x * normal_distribution(x, tl.exp2(-0.7213475204444817 * x * x)) * gate
    if DROPOUT:
        seed = load_seed(seed_ptr)
        out = tl.where(kept(seed, row, columns, threshold), out * scale, 0.0)
    tl.store(out_ptr + row.to(tl.int64) * inner + columns, out.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _geglu_backward(
    grad_ptr, x_ptr, grad_x_ptr, seed_ptr, inner, threshold, scale, DROPOUT: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = columns < inner
    at = row.to(tl.int64) * 2 * inner + columns
    out_at = row.to(tl.int64) * inner + columns
    x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + at + inner, mask=valid, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + out_at, mask=valid, other=0.0).to(tl.float32)
    bell = tl.exp2(-0.7213475204444817 * x * x)  # exp(-x²/2)
    below = normal_distribution(x, bell)
    activated = x * below
    result = activated * gate
    if DROPOUT:
        seed = load_seed(seed_ptr)
        keep = kept(seed, row, columns, threshold)
        grad = tl.where(keep, grad * scale, 0.0)
        result = tl.where(keep, result * scale, 0.0)
    tl.store(grad_ptr + out_at, result.to(grad_ptr.dtype.element_ty), mask=valid)
    grad_x = grad * gate * (below + x * 0.3989422804014327 * bell)
    tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=valid)
    tl.store(grad_x_ptr + at + inner, (grad * activated).to(grad_x_ptr.dtype.element_ty), mask=valid)
