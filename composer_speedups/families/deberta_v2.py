"""DeBERTa-v2 and v3, which share their code: BERT's blocks with disentangled attention, and their unpadded version.

Its attention does not use transformers' attention interface, so the class of the attention modules is changed too.
Relative positions are distances between slots; packed tokens have the same distances if their row has no holes.

Shapes: B rows, S slots per row, T packed tokens, A heads, D units per head, H hidden units, P entries of the table of
relative positions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.families.family import Block, Family, LayerModules
from composer_speedups.families.flops import Lengths, block_flops
from composer_speedups.packing.attention import Relative, disentangled_attention
from composer_speedups.packing.encoder import UnpaddedEncoder
from composer_speedups.packing.layout import Layout, mark_dynamic


class _UnpaddedAttention(nn.Module):
    """The methods of an attention module that accepts packed tokens with :class:`Relative` positions."""

    prefix = "Unpadded"

    num_attention_heads: int
    query_proj: nn.Module
    key_proj: nn.Module
    value_proj: nn.Module
    dropout: nn.Dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Any = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(1, T, H) → (1, T, A·D) with relative positions of packed tokens; otherwise calls the original method."""
        if not isinstance(relative_pos, Relative):
            return super().forward(  # type: ignore[misc, no-any-return]
                hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
        query, key, value = (
            project(hidden_states).squeeze(0) for project in (self.query_proj, self.key_proj, self.value_proj)
        )
        table = _table_of(self, rel_embeddings)
        dropped = self.dropout.p if self.dropout.training else 0.0
        out_TH = disentangled_attention(query, key, value, table, relative_pos, self.num_attention_heads, dropped)
        return out_TH.unsqueeze(0), None


class _UnpaddedDeberta(UnpaddedEncoder):
    """As :class:`UnpaddedEncoder`, with relative positions of packed tokens.

    The surrounding model always requests all hidden states, and reads the last. It receives only the last one, unless
    all hidden states were requested from the model itself.
    """

    layer: nn.ModuleList
    max_relative_positions: int
    position_buckets: int

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(hidden_states, attention_mask, **kwargs)
        if self._call_plan().layout is None:
            return output
        last = output.last_hidden_state
        output = BaseModelOutput(last_hidden_state=last, hidden_states=(last,))
        return output if kwargs.get("return_dict", True) else output.to_tuple()

    def _inputs_of_packed(self, inputs: dict[str, Any], layout: Layout) -> dict[str, Any]:
        return inputs  # the embeddings are multiplied by the mask

    def _packed(self, packed: Tensor, layout: Layout, first_tokens_only: bool = False, **kwargs: Any) -> Any:
        buckets, furthest = self.position_buckets, self.max_relative_positions
        entries = _entries(layout.longest, buckets, furthest, packed.device)
        relative = Relative(layout, entries, first_tokens_only)
        rel_embeddings = self.get_rel_embedding()  # type: ignore[operator]
        for layer in self.layer:
            mark_dynamic(packed)
            packed = layer(packed, None, relative_pos=relative, rel_embeddings=rel_embeddings)[0]
        last: Any = packed
        return BaseModelOutput(last_hidden_state=last)


@torch.compiler.disable  # transformers' function copies a constant to the device
@lru_cache(maxsize=16)  # batches round the length up to a multiple of 128; CUDA graph capture forbids copies
def _entries(longest: int, buckets: int, furthest: int, device: torch.device) -> Tensor:
    """See :class:`Relative`. Computed by transformers' function on the device, so that its logarithm is the
    untouched model's."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position  # which few models need

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        distances = torch.arange(-longest, longest + 1, device=device)
        if buckets > 0 and furthest > 0:
            distances = make_log_bucket_position(distances, buckets, furthest).long()
        span = buckets if buckets > 0 else furthest
        return (distances + span).clamp(0, 2 * span - 1).int()


def _table_of(attention: Any, rel_embeddings: Any) -> Tensor:
    """The table of relative positions, (P, 2·A·D): keys, then queries."""
    dropped = attention.pos_dropout(rel_embeddings)[: 2 * attention.pos_ebd_size]
    key, query = attention.key_proj, attention.query_proj
    if not attention.share_att_key:
        key, query = attention.pos_key_proj, attention.pos_query_proj
    return torch.cat([key(dropped), query(dropped)], 1)


def _refuses(encoder: Any) -> str | None:
    attention = encoder.layer[0].attention.self
    if encoder.conv is not None:
        return "a convolution over slots (conv_kernel_size)"
    if not encoder.relative_attention or {*attention.pos_att_type} != {"c2p", "p2c"}:
        return "other positions than relative_attention=True with pos_att_type=c2p|p2c"
    return None


def _modules(layer: Any) -> LayerModules:
    attention = layer.attention.self
    return LayerModules(
        attention.query_proj, attention.key_proj, attention.value_proj, layer.attention.output.dense,
        layer.attention.output.LayerNorm, layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
        attention.num_attention_heads,
    )  # fmt: skip


def _dropouts(layer: Any) -> list[Any]:
    modules = layer.attention.self.dropout, layer.attention.output.dropout, layer.output.dropout
    return [(module, module) for module in modules]


def _block_flops(config: Any, lengths: Lengths) -> int:
    """BERT's, and for each kind of position score one product per pair of tokens and the projection of the table."""
    if not config.relative_attention:
        return block_flops(config, lengths)
    kinds = len({"c2p", "p2c"}.intersection(config.pos_att_type or ()))
    hidden, layers = config.hidden_size, config.num_hidden_layers
    furthest = config.max_relative_positions if config.max_relative_positions > 0 else config.max_position_embeddings
    entries = 2 * (config.position_buckets if config.position_buckets > 0 else furthest)
    scores, tables = 2 * hidden * int((lengths**2).sum()), 2 * entries * hidden**2
    return block_flops(config, lengths) + layers * kinds * (scores + tables)


DEBERTA_V2 = Family(
    name="deberta_v2",
    title="DeBERTa-v2/v3",
    encoder="DebertaV2Encoder",
    layer="DebertaV2Layer",
    attention="DisentangledSelfAttention",
    embeddings="DebertaV2Embeddings",
    around_blocks=tuple(f"DebertaV2Encoder.{name}" for name in ("rel_embeddings", "LayerNorm", "conv")),
    feed_forward=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    block=Block.DISENTANGLED,
    layer_modules=_modules,
    position_table=lambda layer, rel_embeddings: _table_of(layer.attention.self, rel_embeddings),
    dropouts=_dropouts,
    max_width_with_holes=lambda _: 0,
    refuses=_refuses,
    packed_encoder=_UnpaddedDeberta,
    packed_attention=_UnpaddedAttention,
    block_flops=_block_flops,
)
