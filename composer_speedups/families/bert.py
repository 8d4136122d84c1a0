"""BERT."""

from __future__ import annotations

from typing import Any

from composer_speedups.families.family import Block, Family, LayerModules


def _modules(layer: Any) -> LayerModules:
    attention = layer.attention.self
    return LayerModules(
        attention.query, attention.key, attention.value, layer.attention.output.dense,
        layer.attention.output.LayerNorm, layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
        attention.num_attention_heads,
    )  # fmt: skip


def _dropouts(layer: Any) -> list[Any]:
    attention = layer.attention.self  # the module uses its own mode instead of its dropout's
    projected, out = layer.attention.output.dropout, layer.output.dropout
    return [(attention, attention.dropout), (projected, projected), (out, out)]


FAMILY = Family(
    name="bert",
    title="BERT",
    encoder="BertEncoder",
    layer="BertLayer",
    embeddings="BertEmbeddings",
    feed_forward=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    block=Block.POST_NORM,
    layer_modules=_modules,
    dropouts=_dropouts,
)
