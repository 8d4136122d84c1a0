"""Variable-length attention over packed tokens, as an attention implementation of transformers.

Shapes: B rows, S slots a row, T packed tokens, A heads, D units a head.
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

IMPLEMENTATION = "unpadded"  # transformers takes any name with "flash" in it for the flash-attn package
FLASH = "_flash_attention_forward"
DISENTANGLED = "disentangled_attention"


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make an attention function known to transformers by a name, and what makes its mask.

    A name without a mask of its own would get none at all, and attend to padding.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def keep_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """The mask as the model got it, (B, S): the encoder wants that, and not one score for each pair of tokens."""
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
    """Attention in transformers' signature.

    Args:
        module: The attention module.
        query, key, value: (1, A, T, D) with a plan, else (B, A, S, D).
        attention_mask: None with a plan; else (B, S) or (B, 1, S, S), boolean or added to the scores, or None.
        dropout: Probability of dropping a weight.
        scaling: Of the scores; None is 1/√D.
        unpadding: Where the tokens lie. Without it, attention is computed as transformers' eager one is.
        sliding_window: A token attends to those of its row that are nearer than this; None is all of them. Masks
            of pairs bring their own window. Flash counts packed tokens and so wants rows without holes.
        position_bias: Added to the scores between the slots of each row, (1, A, S, S). Flash takes none.

    Returns:
        (1, T, A, D), or (B, S, A, D); and the weights (B, A, S, S), only without a plan.

    Source: Dao, arXiv 2307.08691, through torch's aten operator.
    """
    window = None if sliding_window is None else sliding_window - 1  # the farthest on either side
    if unpadding is None:
        return _padded(query, key, value, attention_mask, dropout, scaling, window, position_bias)
    heads = query.shape[1]
    packed_TAD = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    if position_bias is None and supports_flash_attention(query.device, query.dtype, query.shape[-1]):
        out_TAD = torch.ops.aten._flash_attention_forward(
            *packed_TAD,
            unpadding.cu_seqlens,
            unpadding.cu_seqlens,
            unpadding.longest,  # rows that are shorter cost next to nothing
            unpadding.longest,
            dropout,
            False,
            False,
            scale=scaling,
            window_size_left=window,
            window_size_right=window,
        )[0]
        return out_TAD.unsqueeze(0), None
    # The same attention where there is no flash kernel: q, k and v alone go back to their padded slots.
    mask = real_keys(unpadding)
    if window is not None:  # padding far from every token would have nothing to attend to: each slot may to itself
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
    """Whether torch's flash kernel runs there; what it does not take is computed row by row with SDPA."""
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
    # SDPA's math kernel comes apart before it is dispatched; no other attention takes this softmax.
    return sorted(name.strip("_") for name in known) or ["scaled_dot_product_math"] * ("_safe_softmax" in counts)


def repad(packed_TH: Tensor, plan: Plan, heads: int) -> Tensor:
    """Packed queries, keys or values of all heads, (T, A·D), in their padded slots, (B, A, S, D); zeros at padding."""
    padded = scatter_tokens(packed_TH, plan.indices_T, plan.mask_BS.numel())
    return padded.view(*plan.mask_BS.shape, heads, -1).transpose(1, 2)


def real_keys(plan: Plan) -> Tensor:
    """Which keys are attended to, (B, 1, 1, S); all of them in a row without any, which would get NaN."""
    return (plan.mask_BS | ~plan.mask_BS.any(-1, keepdim=True))[:, None, None, :]


def _distances(width: int, device: torch.device) -> Tensor:
    """(S, S) of how many slots lie between two, plus one."""
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
            # Added, as in eager attention: queries with nothing to attend to get finite values, and gradients.
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask.bool(), torch.finfo(scores.dtype).min)
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1), dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


# When this module is imported, and so where a changed model is unpickled too.
register_attention(IMPLEMENTATION, unpadded_attention, keep_mask)
