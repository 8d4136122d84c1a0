"""EuroBERT: pre-norm blocks with RMS norms, rotary positions, gated feed-forward layers and, in its larger models,
keys and values that several heads share; and its unpadded version.

Shapes: T packed tokens, H hidden units.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from composer_speedups.families.family import Family, pooling_head_reads
from composer_speedups.families.flops import Lengths, block_flops
from composer_speedups.families.rotary import UnpaddedRotaryModel
from composer_speedups.packing.layout import Layout


class _UnpaddedEuroBert(UnpaddedRotaryModel):
    """As :class:`UnpaddedRotaryModel`, with a norm behind the last layer."""

    embed_tokens: nn.Module
    norm: nn.Module

    def _embed(self, inputs: dict[str, Any]) -> Tensor:
        return inputs["inputs_embeds"] if "inputs_embeds" in inputs else self.embed_tokens(inputs["input_ids"])

    def _packed_layers(
        self, hidden: Tensor, position_ids: Tensor | None, layout: Layout, kwargs: dict[str, Any]
    ) -> Tensor:
        return self.norm(super()._packed_layers(hidden, position_ids, layout, kwargs))  # type: ignore[no-any-return]


def _block_flops(config: Any, lengths: Lengths) -> int:
    width = config.num_attention_heads * config.head_dim
    key_width = config.num_key_value_heads * config.head_dim
    shared = 4 * config.hidden_size * (width - key_width)  # of keys and values, by which their matrices are narrower
    flops = block_flops(config, lengths, feed_forward_matrices=3, attention_width=width)
    return flops - config.num_hidden_layers * int(lengths.sum()) * shared


EUROBERT = Family(
    name="eurobert",
    title="EuroBERT",
    encoder="EuroBertModel",
    blocks="layers",
    layer="EuroBertDecoderLayer",
    embeddings="",  # torch's Embedding
    reads=pooling_head_reads,
    packed_encoder=_UnpaddedEuroBert,
    block_flops=_block_flops,
)
