"""BERT, and the families with its computation under other names: RoBERTa, CamemBERT, XLM-RoBERTa, ELECTRA, DistilBERT
(without dropout of the attention output) and ALBERT (a few blocks that run several times each).

ALBERT's blocks are groups of layers; ``fused_layers`` fuses the layers inside. ``sparse_upcycling`` does not support
it, because it keeps state per block and forward pass, which the next run of the block would overwrite.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from composer_speedups.families.family import Block, Family, LayerModules, Reads, default_head_reads


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


BERT = Family(
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


def _named(name: str, title: str, prefix: str, **settings: Any) -> Family:
    """BERT's modules with another prefix of their classes' names."""
    encoder, layer, embeddings = (f"{prefix}{kind}" for kind in ("Encoder", "Layer", "Embeddings"))
    return replace(BERT, name=name, title=title, encoder=encoder, layer=layer, embeddings=embeddings, **settings)


def _positions(embeddings: Any, ids_BS: Any) -> Any:
    """Positions are counted over the ids that are not padding."""
    return embeddings.create_position_ids_from_input_ids(ids_BS, embeddings.padding_idx)


ROBERTA = _named("roberta", "RoBERTa", "Roberta", positions=_positions)
CAMEMBERT = _named("camembert", "CamemBERT", "Camembert", positions=_positions)
XLM_ROBERTA = _named("xlm_roberta", "XLM-RoBERTa", "XLMRoberta", positions=_positions)


def _electra_reads(model_class: str, config: Any) -> Reads:
    if model_class.endswith("ElectraForPreTraining"):
        return Reads.REAL_TOKENS  # its discriminator's loss uses the attention mask
    return default_head_reads(model_class, config)


ELECTRA = _named(
    "electra", "ELECTRA", "Electra", around_blocks=("ElectraModel.embeddings_project",), reads=_electra_reads
)


def _distilbert_modules(layer: Any) -> LayerModules:
    attention, ffn = layer.attention, layer.ffn
    return LayerModules(
        attention.q_lin, attention.k_lin, attention.v_lin, attention.out_lin, layer.sa_layer_norm,
        ffn.lin1, ffn.lin2, layer.output_layer_norm, attention.n_heads,
    )  # fmt: skip


DISTILBERT = Family(
    name="distilbert",
    title="DistilBERT",
    encoder="Transformer",
    layer="TransformerBlock",
    embeddings="Embeddings",
    feed_forward=("lin1", "activation", "lin2"),
    block=Block.POST_NORM,
    layer_modules=_distilbert_modules,
    dropouts=lambda layer: [(layer.attention, layer.attention.dropout), None, (layer.ffn.dropout, layer.ffn.dropout)],
    inner="hidden_dim",
    activation="activation",
)


def _albert_modules(layer: Any) -> LayerModules:
    attention = layer.attention
    return LayerModules(
        attention.query, attention.key, attention.value, attention.dense, attention.LayerNorm,
        layer.ffn, layer.ffn_output, layer.full_layer_layer_norm, attention.num_attention_heads,
    )  # fmt: skip


def _albert_dropouts(layer: Any) -> list[Any]:
    attention = layer.attention  # the module uses its own mode instead of its dropout's
    projected = attention.output_dropout
    return [(attention, attention.attention_dropout), (projected, projected), None]  # layer.dropout is not used


ALBERT = Family(
    name="albert",
    title="ALBERT",
    encoder="AlbertTransformer",
    blocks="albert_layer_groups",
    layer="AlbertLayerGroup",
    inner_layer="AlbertLayer",
    embeddings="AlbertEmbeddings",
    block=Block.POST_NORM,
    layer_modules=_albert_modules,
    dropouts=_albert_dropouts,
)
