"""MPNet: BERT's blocks with a relative position bias added to the scores, and its unpadded version.

Its attention does not use transformers' attention interface, so the class of the attention modules is changed too. The
bias depends on distances between slots; packed tokens have the same distances if their row has no holes.

Shapes: T packed tokens, A heads, D units per head, H hidden units, L a bound on the length of a row.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.families.family import Block, Family, LayerModules
from composer_speedups.packing.attention import PositionBias, unpadded_attention
from composer_speedups.packing.encoder import UnpaddedEncoder
from composer_speedups.packing.layout import Layout, mark_dynamic


class _UnpaddedAttention(nn.Module):
    """The methods of an attention module that accepts packed tokens with a :class:`PositionBias`."""

    prefix = "Unpadded"

    num_attention_heads: int
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    dropout: nn.Dropout

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Any = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """(1, T, H) → (1, T, H) with a bias of packed tokens; otherwise calls the original method."""
        if not isinstance(position_bias, PositionBias):
            return super().forward(hidden_states, attention_mask, position_bias, **kwargs)  # type: ignore[misc, no-any-return]
        heads = self.num_attention_heads
        query, key, value = (
            project(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        dropped = self.dropout.p if self.dropout.training else 0.0
        attended_1TAD, _ = unpadded_attention(
            self, query, key, value, None, dropped, layout=position_bias.layout, position_bias=position_bias
        )
        return (self.o(attended_1TAD.flatten(2)),)


class _UnpaddedMPNet(UnpaddedEncoder):
    """As :class:`UnpaddedEncoder`, with a position bias by distance, which all layers share."""

    layer: nn.ModuleList
    relative_attention_bias: nn.Embedding

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, return_dict: bool = False, **kwargs: Any
    ) -> Any:
        output = super().forward(hidden_states, attention_mask, return_dict=True, **kwargs)
        return output if return_dict else output.to_tuple()

    def _packed(
        self, packed: Tensor, layout: Layout, return_dict: bool = True, first_tokens_only: bool = False, **kwargs: Any
    ) -> Any:
        buckets = _buckets(layout.longest, packed.device)
        by_distance = self.relative_attention_bias(buckets).float().t()  # (A, 2·L + 1)
        bias = PositionBias(layout, by_distance, first_tokens_only)
        for layer in self.layer:
            mark_dynamic(packed)
            packed = layer(packed, position_bias=bias, layout=layout, **kwargs)[0]
        last: Any = packed
        return BaseModelOutput(last_hidden_state=last)


@torch.compiler.disable  # transformers' function copies the buckets to the device
@lru_cache(maxsize=16)  # batches round the length up to a multiple of 128; CUDA graph capture forbids copies
def _buckets(longest: int, device: torch.device) -> Tensor:
    """The table's entry for each distance from -L to L of a query from a key, int64 (2·L + 1,), as the untouched model
    looks it up: its function is called with a table that returns the entries."""
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder  # which few models need

    entries: Any = SimpleNamespace(relative_attention_bias=lambda x: x.unsqueeze(-1))
    entries.relative_position_bucket = MPNetEncoder.relative_position_bucket
    with torch.no_grad():
        slots = torch.empty(1, longest + 1, device=device)
        of_slots = MPNetEncoder.compute_position_bias(entries, slots)[0, 0]  # (L + 1, L + 1)
    return torch.cat([of_slots[0].flip(0), of_slots[1:, 0]])


def _positions(embeddings: Any, ids_BS: Tensor) -> Tensor:
    """Positions are counted over the ids that are not padding."""
    from transformers.models.mpnet.modeling_mpnet import create_position_ids_from_input_ids  # which few models need

    return create_position_ids_from_input_ids(ids_BS, embeddings.padding_idx)  # type: ignore[no-any-return]


def _modules(layer: Any) -> LayerModules:
    attention = layer.attention.attn
    return LayerModules(
        attention.q, attention.k, attention.v, attention.o, layer.attention.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm, attention.num_attention_heads,
    )  # fmt: skip


def _dropouts(layer: Any) -> list[Any]:
    modules = layer.attention.attn.dropout, layer.attention.dropout, layer.output.dropout
    return [(module, module) for module in modules]


MPNET = Family(
    name="mpnet",
    title="MPNet",
    encoder="MPNetEncoder",
    layer="MPNetLayer",
    attention="MPNetSelfAttention",
    embeddings="MPNetEmbeddings",
    around_blocks=("MPNetEncoder.relative_attention_bias",),
    feed_forward=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    block=Block.BIASED,
    layer_modules=_modules,
    dropouts=_dropouts,
    max_width_with_holes=lambda _: 0,
    positions=_positions,
    packed_encoder=_UnpaddedMPNet,
    packed_attention=_UnpaddedAttention,
)
