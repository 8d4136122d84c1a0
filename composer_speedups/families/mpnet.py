"""MPNet: BERT's blocks with a relative position bias added to the scores, and its unpadded version.

Its attention does not use transformers' attention interface, so the class of the attention modules is changed too. The
bias is defined between slots of a row, so queries, keys and values are moved back to their slots, and everything else
stays packed.

Shapes: B rows, S slots per row, T packed tokens, A heads, D units per head, H hidden units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.families.family import Family
from composer_speedups.packing.attention import unpadded_attention
from composer_speedups.packing.encoder import UnpaddedEncoder
from composer_speedups.packing.tokens import TokenLayout, mark_dynamic

__all__ = ["FAMILY"]


class _PackedBias(NamedTuple):
    """Replaces the bias (B, A, S, S): the bias of one row, and the layout of the packed tokens."""

    bias_1ASS: Tensor
    layout: TokenLayout


class _UnpaddedAttention(nn.Module):
    """The methods of an attention module that accepts packed tokens with a :class:`_PackedBias`."""

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
        """(1, T, H) → (1, T, H) with a packed bias; otherwise calls the original method."""
        if not isinstance(position_bias, _PackedBias):
            return super().forward(hidden_states, attention_mask, position_bias, **kwargs)  # type: ignore[misc, no-any-return]
        heads = self.num_attention_heads
        query, key, value = (
            project(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        dropped = self.dropout.p if self.dropout.training else 0.0
        attended_1TAD, _ = unpadded_attention(
            self,
            query,
            key,
            value,
            None,
            dropped,
            layout=position_bias.layout,
            position_bias=position_bias.bias_1ASS,
        )
        return (self.o(attended_1TAD.flatten(2)),)


class _UnpaddedMPNet(UnpaddedEncoder):
    """As :class:`UnpaddedEncoder`, with one position bias for all rows."""

    layer: nn.ModuleList

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, return_dict: bool = False, **kwargs: Any
    ) -> Any:
        output = super().forward(hidden_states, attention_mask, return_dict=True, **kwargs)
        return output if return_dict else output.to_tuple()

    def _packed(self, packed: Tensor, layout: TokenLayout, return_dict: bool = True, **kwargs: Any) -> Any:
        bias_1ASS = self.compute_position_bias(packed.new_empty(1, layout.mask_BS.shape[1]))  # type: ignore[operator]
        for layer in self.layer:
            mark_dynamic(packed)
            packed = layer(packed, None, _PackedBias(bias_1ASS, layout), layout=layout, **kwargs)[0]
        last: Any = packed
        return BaseModelOutput(last_hidden_state=last)


def _positions(embeddings: Any, ids_BS: Tensor) -> Tensor:
    """Positions are counted over the ids that are not padding."""
    # imported here, since few models need it
    from transformers.models.mpnet.modeling_mpnet import create_position_ids_from_input_ids

    return create_position_ids_from_input_ids(ids_BS, embeddings.padding_idx)  # type: ignore[no-any-return]


FAMILY = Family(
    name="mpnet",
    title="MPNet",
    encoder="MPNetEncoder",
    layer="MPNetLayer",
    attention="MPNetSelfAttention",
    embeddings="MPNetEmbeddings",
    around_blocks=("MPNetEncoder.relative_attention_bias",),
    feed_forward=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    position_bias=True,
    positions=_positions,
    packed_encoder=_UnpaddedMPNet,
    packed_attention=_UnpaddedAttention,
)
