"""T5's encoder: pre-norms without bias, and a relative position bias that the first block computes for all.

Its stack embeds the ids itself, so it packs behind its embeddings. The bias depends on distances between slots; packed
tokens have the same distances if their row has no holes. Models with T5's decoder are refused.

Shapes: B rows, S slots per row, T packed tokens, A heads, H hidden units, L a bound on the length of a row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from composer_speedups.families.family import Family, Reads, default_head_reads
from composer_speedups.families.flops import Lengths, block_flops
from composer_speedups.packing.attention import PositionBias
from composer_speedups.packing.encoder import UnpaddedEncoder, UnpaddedModel
from composer_speedups.packing.layout import Layout, mark_dynamic

_ENCODERS = ("T5Stack", "T5EncoderModel", "T5ForTokenClassification")  # its other models have a decoder


class _UnpaddedT5(UnpaddedModel):
    """Token ids (B, S) or embeddings (B, S, H) → transformers' output with the last hidden state (B, S, H), zeros
    at padding."""

    embed_tokens: nn.Module
    block: nn.ModuleList
    final_layer_norm: nn.Module
    dropout: nn.Module

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        plan = self._call_plan()
        if plan.layout is None:
            stock: Any = super(UnpaddedEncoder, self)
            output = stock.forward(input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
            return self._padded(plan, output)
        embedded: Any = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        packed = plan.layout.gather(embedded).unsqueeze(0)
        return self._output(self._packed_blocks(self.dropout(packed), plan.layout, kwargs), plan)

    def _packed_blocks(self, packed: Tensor, layout: Layout, kwargs: dict[str, Any]) -> Tensor:
        """(1, T, H) → (1, T, H), through the blocks and the last norm."""
        first: Any = self.block[0]
        attention = first.layer[0].SelfAttention
        table, furthest = attention.relative_attention_bias, attention.relative_attention_max_distance
        buckets = _buckets(layout.longest, table.num_embeddings, furthest, packed.device)
        bias = PositionBias(layout, table(buckets).float().t())
        for block in self.block:
            mark_dynamic(packed)
            packed = block(packed, None, bias, layout=layout, **kwargs)[0]
        return self.dropout(self.final_layer_norm(packed))  # type: ignore[no-any-return]


@torch.compiler.disable  # the cache is not part of a graph
@lru_cache(maxsize=16)  # batches round the length up to a multiple of 128; CUDA graph capture forbids copies
def _buckets(longest: int, entries: int, furthest: int, device: torch.device) -> Tensor:
    """The table's entry for each distance from -L to L of a query from a key, int64 (2·L + 1,), computed by
    transformers' function on the device, so that its logarithm is the untouched model's."""
    from transformers.models.t5.modeling_t5 import T5Attention  # which few models need

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        ahead = torch.arange(longest, -longest - 1, -1, device=device)  # of the key, relative to the query
        return T5Attention._relative_position_bucket(ahead, num_buckets=entries, max_distance=furthest)  # type: ignore[no-any-return]


def _reads(model_class: str, config: Any) -> Reads:
    if model_class.startswith("T5") and model_class not in _ENCODERS:
        return Reads.DECODER
    return default_head_reads(model_class, config)


def _block_flops(config: Any, lengths: Lengths) -> int:
    matrices = 3 if config.is_gated_act else 2
    return block_flops(config, lengths, feed_forward_matrices=matrices, attention_width=config.num_heads * config.d_kv)


T5 = Family(
    name="t5",
    title="T5's encoder",
    encoder="T5Stack",
    blocks="block",
    layer="T5Block",
    embeddings="",  # the stack's Embedding is torch's
    reads=_reads,
    max_width_with_holes=lambda _: 0,
    packed_encoder=_UnpaddedT5,
    block_flops=_block_flops,
    inner="d_ff",
    activation="dense_act_fn",
)
