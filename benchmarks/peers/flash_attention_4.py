"""Flash Attention 4, of the package flash-attn-4, between the tokens of each text, as operators that torch.compile
calls and does not trace. It has no dropout.

torch 2.11's ``activate_flash_attention_impl("FA4")`` expects two results of a function that returns five in the
package's 4.0.0b36, and has no window in its backward pass; the operators call the package's functions themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composer_speedups.core.errors import ConfigError, first_line


def check_package(device: torch.device) -> None:
    """Raise ConfigError if the package cannot run on a device."""
    try:
        _package()
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # a library or its version is missing
        raise ConfigError(f"peer.attention: flash-attn-4 cannot be imported ({first_line(error)})") from error
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        raise ConfigError(f"peer.attention: FA4 needs a Hopper GPU or newer, and the device is {device}")


def _package() -> Any:
    from flash_attn.cute import interface

    return interface


def _rows(starts: Tensor, longest: int, window: int | None) -> dict[str, Any]:
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "window_size_left": window,
        "window_size_right": window,
    }


@torch.library.custom_op("benchmarks::flash_attention_4", mutates_args=())
def flash_attention_4(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention (T, heads, units) → the same, and the logarithms of the sums, float32 (heads, T).

    Texts begin at ``starts``, int32, which ends with T; ``window`` is the largest distance on either side.
    """
    rows = _rows(starts, longest, window)
    out, sums, *_ = _package()._flash_attn_fwd(query, key, value, softmax_scale=scale, return_lse=True, **rows)
    return out, sums


@torch.library.custom_op("benchmarks::flash_attention_4_gradients", mutates_args=())
def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(starts, longest, window)
    return tuple(_package()._flash_attn_bwd(query, key, value, out, grad, sums, softmax_scale=scale, **rows))  # type: ignore[return-value]


@flash_attention_4.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _units = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)


@_gradients.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, starts)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None, None


flash_attention_4.register_autograd(_backward, setup_context=_setup_context)
