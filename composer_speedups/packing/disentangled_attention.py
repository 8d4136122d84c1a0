"""DeBERTa's attention over packed tokens: a Triton kernel in 16 bits on a GPU, torch operators elsewhere.

Shapes: B rows, S slots per row, T packed tokens, A heads, D units per head, L a bound on the length of a row, P entries
of the table of relative positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups.kernels.host import ran
from composer_speedups.packing.attention import pack_heads, real_keys, repad, supports_triton_attention
from composer_speedups.packing.layout import Layout


class Relative(NamedTuple):
    """Replaces the relative positions (1, S, S).

    Attributes:
        layout: The layout of the packed tokens. Rows have no holes, so packed tokens have the distances of their slots.
        entries: int32 (2·L + 1,), L being ``layout.longest``: the table entry for each distance from -L to L of a query
            from a key.
        first_tokens_only: Only each row's first token of the encoder's result is read.
    """

    layout: Layout
    entries: Tensor
    first_tokens_only: bool = False


def disentangled_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, relative: Relative, heads: int, dropout: float
) -> Tensor:
    """softmax((q kᵀ + q·position key + k·position query) / √(3·D)) v.

    Args:
        query, key, value: (T, A·D).
        positions: (P, 2·A·D): keys of the relative positions, then their queries.
        relative: See :class:`Relative`.
        heads: A.
        dropout: Dropout probability of the attention weights.

    Returns:
        (T, A·D).
    """
    ran("packed_layer")
    layout, size = relative.layout, query.shape[1] // heads
    if supports_triton_attention(query.device, query.dtype, size):
        from composer_speedups.kernels.disentangled_attention import attend  # imports Triton

        ran("disentangled_attention")
        qkv = torch.cat([query, key, value], 1)
        return attend(qkv, positions.contiguous(), relative.entries, layout.cu_seqlens, layout.longest, heads, dropout)
    queries, keys, values = (repad(x, layout, heads) for x in (query, key, value))
    bias_BASS = position_scores(queries, keys, positions, relative)
    return pack_heads(_attention(queries, keys, values, bias_BASS, layout, dropout), layout)


def first_tokens_disentangled_attention(
    query_BAD: Tensor, key_BASD: Tensor, value_BASD: Tensor, positions: Tensor, relative: Relative, dropout: float
) -> Tensor:
    """The attention output of each row's first token only, (B, A·D)."""
    queries = query_BAD.unsqueeze(2)
    bias_BA1S = position_scores(queries, key_BASD, positions, relative)
    return _attention(queries, key_BASD, value_BASD, bias_BA1S, relative.layout, dropout).flatten(1)


def position_scores(query_BAQD: Tensor, key_BASD: Tensor, positions: Tensor, relative: Relative) -> Tensor:
    """Unscaled position scores of the first Q queries and all keys, (B, A, Q, S)."""
    heads, first, slots = query_BAQD.shape[1], query_BAQD.shape[2], key_BASD.shape[2]
    table_2APD = positions.unflatten(1, (2, heads, -1)).permute(1, 2, 3, 0)  # (2, A, D, P)
    place = torch.arange(slots, device=query_BAQD.device)
    entry_QS = relative.entries.long()[place[:first, None] - place + relative.layout.longest]
    by_query = (query_BAQD @ table_2APD[0]).gather(3, entry_QS.expand(len(query_BAQD), heads, -1, -1))
    by_key = (key_BASD @ table_2APD[1]).gather(3, entry_QS.T.expand(len(key_BASD), heads, -1, -1))
    return by_query + by_key.transpose(2, 3)


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, layout: Layout, dropout: float) -> Tensor:
    scale = float((3 * query.shape[-1]) ** -0.5)
    bias = (bias * scale).masked_fill(~real_keys(layout), torch.finfo(bias.dtype).min)
    return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
