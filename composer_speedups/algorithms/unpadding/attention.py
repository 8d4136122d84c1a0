"""Variable-length attention over packed tokens, as an attention implementation of transformers.

Shapes: B rows, S slots a row, T packed tokens, A heads, D units a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from composer_speedups.algorithms.unpadding.plan import Plan, gather_tokens, scatter_tokens

__all__ = ["FLASH", "IMPLEMENTATION", "operators_among", "takes_flash", "unpadded_attention"]

IMPLEMENTATION = "unpadded"  # transformers takes any name with "flash" in it for the flash-attn package
FLASH = "_flash_attention_forward"


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

    Returns:
        (1, T, A, D), or (B, S, A, D); and the weights (B, A, S, S), only without a plan.

    Source: Dao, arXiv 2307.08691, through torch's aten operator.
    """
    window = None if sliding_window is None else sliding_window - 1  # the farthest on either side
    if unpadding is None:
        return _padded(query, key, value, attention_mask, dropout, scaling, window)
    function = _flash if takes_flash(query.device, query.dtype, query.shape[-1]) else _repadded
    return function(query, key, value, unpadding, dropout, scaling, window), None


def takes_flash(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
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
    known = [name for name in counts if name.startswith(("_scaled_dot_product", FLASH))]
    # SDPA's math kernel comes apart before it is dispatched; no other attention takes this softmax.
    return sorted(name.strip("_") for name in known) or ["scaled_dot_product_math"] * ("_safe_softmax" in counts)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    dropout: float,
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    query_TAD, key_TAD, value_TAD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out_TAD = torch.ops.aten._flash_attention_forward(
        query_TAD,
        key_TAD,
        value_TAD,
        plan.cu_seqlens,
        plan.cu_seqlens,
        plan.longest,  # rows that are shorter cost next to nothing
        plan.longest,
        dropout,
        False,
        False,
        scale=scaling,
        window_size_left=window,
        window_size_right=window,
    )[0]
    return out_TAD.unsqueeze(0)


def _repadded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    dropout: float,
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    """The same attention where there is no flash kernel: q, k and v alone go back to their padded slots."""
    (rows, width), (_, heads, _, head_size) = plan.mask_BS.shape, query.shape

    def repad(x: Tensor) -> Tensor:
        packed = x.squeeze(0).transpose(0, 1).flatten(1)
        padded = scatter_tokens(packed, plan.indices_T, rows * width)
        return padded.view(rows, width, heads, head_size).transpose(1, 2)

    # A row without a token would have nothing to attend to, and NaN for it.
    mask = (plan.mask_BS | ~plan.mask_BS.any(-1, keepdim=True))[:, None, None, :]
    if window is not None:  # nor would padding far from every token: each slot may attend to itself
        distance_SS = _distances(width, query.device)
        mask = (mask & (distance_SS <= window)) | (distance_SS == 0)
    out_BASD = F.scaled_dot_product_attention(repad(query), repad(key), repad(value), mask, dropout, scale=scaling)
    packed = gather_tokens(out_BASD.transpose(1, 2).reshape(rows * width, -1), plan.indices_T)
    return packed.view(1, -1, heads, head_size)


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
) -> tuple[Tensor, Tensor]:
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
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
AttentionInterface.register(IMPLEMENTATION, unpadded_attention)
AttentionMaskInterface.register(IMPLEMENTATION, keep_mask)
