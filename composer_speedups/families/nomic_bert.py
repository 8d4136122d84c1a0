"""NomicBERT: post-norm blocks with rotary positions and gated feed-forward layers, whose Linears have no biases."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from composer_speedups.families.family import Family
from composer_speedups.families.flops import block_flops
from composer_speedups.families.rotary import UnpaddedRotaryBert


def _block_flops(config: Any, lengths: Tensor) -> int:
    width = config.num_attention_heads * config.head_dim
    return block_flops(config, lengths, feed_forward_matrices=3, attention_width=width)


FAMILY = Family(
    name="nomic_bert",
    title="NomicBERT",
    encoder="NomicBertModel",
    blocks="layers",
    layer="NomicBertLayer",
    embeddings="NomicBertEmbeddings",
    packed_encoder=UnpaddedRotaryBert,
    block_flops=_block_flops,
)
