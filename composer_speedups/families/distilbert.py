"""DistilBERT: BERT's computation under different names, without dropout of the attention output."""

from __future__ import annotations

from typing import Any

from composer_speedups.families.family import Block, Family, LayerModules


def _modules(layer: Any) -> LayerModules:
    attention, ffn = layer.attention, layer.ffn
    return LayerModules(
        attention.q_lin, attention.k_lin, attention.v_lin, attention.out_lin, layer.sa_layer_norm,
        ffn.lin1, ffn.lin2, layer.output_layer_norm, attention.n_heads,
    )  # fmt: skip


def _dropouts(layer: Any) -> list[Any]:
    dropped = layer.ffn.dropout
    return [(layer.attention, layer.attention.dropout), None, (dropped, dropped)]


FAMILY = Family(
    name="distilbert",
    title="DistilBERT",
    encoder="Transformer",
    layer="TransformerBlock",
    embeddings="Embeddings",
    feed_forward=("lin1", "activation", "lin2"),
    block=Block.POST_NORM,
    layer_modules=_modules,
    dropouts=_dropouts,
    hidden="dim",
    inner="hidden_dim",
    heads="n_heads",
    embedding="dim",
    activation="activation",
    attention_dropout="attention_dropout",
    attention_output_dropout=None,
    hidden_dropout="dropout",
)
