"""ALBERT: a few blocks that run several times each, and embeddings of a different width, which the encoder projects.

A block is a group of layers; ``fused_layers`` fuses the layers inside. ``sparse_upcycling`` does not support this
family, because it keeps state per block and forward pass (where tokens were routed), which the next run of the block
would overwrite.
"""

from __future__ import annotations

from typing import Any

from composer_speedups.families.family import Block, Family, LayerModules


def _modules(layer: Any) -> LayerModules:
    attention = layer.attention
    return LayerModules(
        attention.query, attention.key, attention.value, attention.dense, attention.LayerNorm,
        layer.ffn, layer.ffn_output, layer.full_layer_layer_norm, attention.num_attention_heads,
    )  # fmt: skip


def _dropouts(layer: Any) -> list[Any]:
    attention = layer.attention  # the module uses its own mode instead of its dropout's
    projected = attention.output_dropout
    return [(attention, attention.attention_dropout), (projected, projected), None]  # layer.dropout is not used


FAMILY = Family(
    name="albert",
    title="ALBERT",
    encoder="AlbertTransformer",
    blocks="albert_layer_groups",
    layer="AlbertLayerGroup",
    inner_layer="AlbertLayer",
    embeddings="AlbertEmbeddings",
    block=Block.POST_NORM,
    layer_modules=_modules,
    dropouts=_dropouts,
    repeats_blocks=True,
    embedding="embedding_size",
)
