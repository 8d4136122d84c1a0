"""Jina Embeddings v3: BERT's blocks with rotary positions, and their unpadded version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from composer_speedups.families.family import Block, Family, LayerModules
from composer_speedups.families.rotary import UnpaddedRotaryBert


def _modules(layer: Any) -> LayerModules:
    attention, mlp = layer.self_attn, layer.mlp
    heads = attention.q_proj.out_features // attention.head_dim
    return LayerModules(
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.post_attention_layernorm,
        mlp.fc1, mlp.fc2, layer.post_mlp_layernorm, heads,
    )  # fmt: skip


def _dropouts(layer: Any) -> list[Any]:
    weights = SimpleNamespace(p=layer.self_attn.attention_dropout)  # not a separate module
    projected, out = layer.post_attention_dropout, layer.post_mlp_dropout
    return [(layer.self_attn, weights), (projected, projected), (out, out)]


FAMILY = Family(
    name="jina_embeddings_v3",
    title="Jina Embeddings v3",
    encoder="JinaEmbeddingsV3Model",
    blocks="layers",
    layer="JinaEmbeddingsV3Layer",
    embeddings="JinaEmbeddingsV3Embeddings",
    feed_forward=("fc1", "activation_fn", "fc2"),
    block=Block.ROTARY,
    layer_modules=_modules,
    dropouts=_dropouts,
    packed_encoder=UnpaddedRotaryBert,
)
