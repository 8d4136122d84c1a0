"""Variable-length attention over packed tokens, as an attention implementation of transformers.

Shapes: B rows, S slots per row, T packed tokens, A heads, D units per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from composer_speedups.families.packed_tokens import Plan, gather_tokens, scatter_tokens

__all__ = [
    "DISENTANGLED",
    "FLASH",
    "IMPLEMENTATION",
    "operators_among",
    "real_keys",
    "register_attention",
    "repad",
    "supports_flash_attention",
    "unpadded_attention",
]

IMPLEMENTATION = "unpadded"  # transformers assumes the flash-attn package for any name that contains "flash"
FLASH = "_flash_attention_forward"
DISENTANGLED = "disentangled_attention"


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register an attention function and its mask function with transformers.

    Without its own mask function, an implementation would receive no mask and attend to padding.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def keep_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Return the model's mask (B, S) unchanged, because the encoder needs it instead of a mask per pair of tokens."""
    return attention_mask


def unpadded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    unpadding: Plan | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with transformers' signature.

    Args:
        module: The attention module.
        query, key, value: (1, A, T, D) with a plan, otherwise (B, A, S, D).
        attention_mask: None with a plan; otherwise (B, S) or (B, 1, S, S), boolean or additive, or None.
        dropout: Dropout probability of the attention weights.
        scaling: Scale of the scores; None for 1/√D.
        unpadding: The layout of the packed tokens. Without it, attention is computed as in transformers' eager
            implementation.
        sliding_window: A token attends only to tokens of its row at a smaller distance than this; None for all. Masks
            of pairs include their window. Flash attention counts packed tokens, so rows must not have holes.
        position_bias: Added to the scores between the slots of each row, (1, A, S, S). Not supported by flash
            attention.

    Returns:
        (1, T, A, D) or (B, S, A, D), and the attention weights (B, A, S, S) only without a plan.

    Source: Dao, arXiv 2307.08691, through torch's aten operator.
    """
    window = None if sliding_window is None else sliding_window - 1  # the largest distance on either side
    if unpadding is None:
        return _padded(query, key, value, attention_mask, dropout, scaling, window, position_bias)
    heads = query.shape[1]
    packed_TAD = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    if position_bias is None and supports_flash_attention(query.device, query.dtype, query.shape[-1]):
        out_TAD = torch.ops.aten._flash_attention_forward(
            *packed_TAD,
            unpadding.cu_seqlens,
            unpadding.cu_seqlens,
            unpadding.longest,  # shorter rows cost almost nothing
            unpadding.longest,
            dropout,
            False,
            False,
            scale=scaling,
            window_size_left=window,
            window_size_right=window,
        )[0]
        return out_TAD.unsqueeze(0), None
    # Without a flash kernel: only q, k and v are moved back to their padded slots.
    mask = real_keys(unpadding)
    # padding slots far from every token would attend to nothing, so each slot may attend to itself
    if window is not None:
        distance_SS = _distances(unpadding.mask_BS.shape[1], query.device)
        mask = (mask & (distance_SS <= window)) | (distance_SS == 0)
    if position_bias is not None:
        bias = position_bias.to(query.dtype)
        mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)  # (B, A, S, S)
    queries, keys, values = (repad(x.flatten(1), unpadding, heads) for x in packed_TAD)
    out_BASD = F.scaled_dot_product_attention(queries, keys, values, mask, dropout, scale=scaling)
    out_TH = gather_tokens(out_BASD.transpose(1, 2).reshape(unpadding.mask_BS.numel(), -1), unpadding.indices_T)
    return out_TH.view(1, -1, heads, query.shape[-1]), None


def supports_flash_attention(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether torch's flash kernel supports these tensors. Others are computed on padded rows with SDPA."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_size % 8 == 0
        and head_size <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def operators_among(counts: dict[str, int]) -> list[str]:
    """The attention operators in a count of aten operators."""
    known = [name for name in counts if name.startswith(("_scaled_dot_product", FLASH, DISENTANGLED))]
    # SDPA's math kernel is decomposed before dispatch; no other attention uses this softmax operator.
    return sorted(name.strip("_") for name in known) or ["scaled_dot_product_math"] * ("_safe_softmax" in counts)


def repad(packed_TH: Tensor, plan: Plan, heads: int) -> Tensor:
    """Packed queries, keys or values of all heads, (T, A·D), in their padded slots, (B, A, S, D); zeros at padding."""
    padded = scatter_tokens(packed_TH, plan.indices_T, plan.mask_BS.numel())
    return padded.view(*plan.mask_BS.shape, heads, -1).transpose(1, 2)


def real_keys(plan: Plan) -> Tensor:
    """The keys to attend to, (B, 1, 1, S); in rows without real tokens all of them, because the result would be NaN."""
    return (plan.mask_BS | ~plan.mask_BS.any(-1, keepdim=True))[:, None, None, :]


def _distances(width: int, device: torch.device) -> Tensor:
    """(S, S): the distance between two slots plus one."""
    slots = torch.arange(width, device=device)
    return (slots[:, None] - slots).abs()


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    window: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if bias is not None:
        scores = scores + bias
    if window is not None and (mask is None or mask.ndim == 2):
        near = _distances(query.shape[2], query.device) <= window
        mask = near if mask is None else near & mask[:, None, None, :].bool()
    elif mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    if mask is not None:
        if not mask.is_floating_point():
            # Added, as in eager attention: queries with nothing to attend to have finite values and gradients.
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask.bool(), torch.finfo(scores.dtype).min)
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1), dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


# Registered at import, so that it is also available when a changed model is unpickled.
register_attention(IMPLEMENTATION, unpadded_attention, keep_mask)
