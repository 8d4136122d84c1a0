"""Attention with a bias by distance, as a custom operator with autograd that is opaque to ``torch.compile``.

Shapes: T tokens, A heads, D units per head, R rows, L a bound on the length of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composer_speedups.kernels.attention import attention_backward, attention_forward
from composer_speedups.kernels.dropout import draw_seeds

__all__ = ["attend"]


def attend(
    qkv: Tensor, bias: Tensor, cu_seqlens: Tensor, longest: int, heads: int, dropout: float, scale: float | None = None
) -> Tensor:
    """Compute softmax(scale · q kᵀ + bias) v for each row, (T, A·D), with gradients of ``qkv`` and ``bias``.

    Args:
        qkv, cu_seqlens, longest, heads, dropout, scale: As in :func:`~.attention.attention_forward`.
        bias: As there, float32 (A, 2·L + 1).
    """
    (seed,) = draw_seeds(1, qkv.device, dropout=dropout > 0)
    scale = (qkv.shape[1] // 3 // heads) ** -0.5 if scale is None else scale
    out, _ = _operator(qkv, bias, cu_seqlens, longest, heads, dropout, scale, seed)
    return out  # type: ignore[no-any-return]


def _forward(
    qkv: Tensor, bias: Tensor, cu: Tensor, longest: int, heads: int, dropout: float, scale: float, seed: Tensor
) -> tuple[Tensor, Tensor]:
    return attention_forward(qkv, cu, longest, heads, dropout, seed, bias=bias, scale=scale)


def _gradients(
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


# Explicit schemas: annotations are strings in this file, and not every release of torch infers schemas from strings.
_ROWS = "Tensor cu_seqlens, SymInt longest"
_operator = torch.library.custom_op(
    "composer_speedups::biased_attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor qkv, Tensor bias, {_ROWS}, int heads, float dropout, float scale, Tensor seed) "
    "-> (Tensor, Tensor)",
)
_operator_backward = torch.library.custom_op(
    "composer_speedups::biased_attention_backward",
    _gradients,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor qkv, Tensor bias, Tensor out, Tensor logs, "
    f"{_ROWS}, float dropout, float scale, Tensor seed) -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(qkv: Tensor, _b: Tensor, _c: Tensor, _l: int, heads: int, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, width = qkv.shape
    return qkv.new_empty(tokens, width // 3), qkv.new_empty(heads, tokens, dtype=torch.float32)


@_operator_backward.register_fake
def _(_g: Tensor, qkv: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, cu_seqlens, ctx.longest, _, ctx.dropout, ctx.scale, seed = inputs
    ctx.save_for_backward(qkv, bias, *output, cu_seqlens, seed)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    qkv, bias, out, logs, cu_seqlens, seed = ctx.saved_tensors
    inputs = (qkv, bias, out, logs, cu_seqlens, ctx.longest, ctx.dropout, ctx.scale, seed)
    grad, grad_bias = _operator_backward(grad_out, *inputs)
    return grad, grad_bias, None, None, None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
