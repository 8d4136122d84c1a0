"""Jina Embeddings v3: BERT's blocks with rotary positions, and their unpadded version."""

from __future__ import annotations

from composer_speedups.families.family import Family
from composer_speedups.families.rotary import UnpaddedRotaryBert

__all__ = ["FAMILY"]


FAMILY = Family(
    name="jina_embeddings_v3",
    title="Jina Embeddings v3",
    encoder="JinaEmbeddingsV3Model",
    blocks="layers",
    layer="JinaEmbeddingsV3Layer",
    embeddings="JinaEmbeddingsV3Embeddings",
    query_and_value=("q_proj", "v_proj"),
    feed_forward=("fc1", "activation_fn", "fc2"),
    packed_encoder=UnpaddedRotaryBert,
)
