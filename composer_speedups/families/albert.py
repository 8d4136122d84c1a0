"""ALBERT: few blocks, each run several times, and embeddings of a width of their own that the encoder projects.

A block is a group of layers. Fused layers and experts take a block to be run once, and are not for this family: what
they keep of a pass (what the last layer is read for, where tokens were routed) would be that of its last run.
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
    query_and_value=("query", "value"),
    embedding="embedding_size",
)
