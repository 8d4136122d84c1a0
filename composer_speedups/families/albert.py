"""ALBERT: a few blocks that run several times each, and embeddings of a different width, which the encoder projects.

A block is a group of layers. ``fused_layers`` and ``sparse_upcycling`` do not support this family, because they keep
state per block and forward pass (what the last layer is read for, where tokens were routed), which the next run of the
block would overwrite.
"""

from __future__ import annotations

from composer_speedups.families.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    name="albert",
    title="ALBERT",
    encoder="AlbertTransformer",
    blocks="albert_layer_groups",
    layer="AlbertLayerGroup",
    embeddings="AlbertEmbeddings",
    repeats_blocks=True,
    embedding="embedding_size",
)
