"""CamemBERT: RoBERTa's modules under different names."""

from __future__ import annotations

from dataclasses import replace

from composer_speedups.families import roberta

FAMILY = replace(
    roberta.FAMILY,
    name="camembert",
    title="CamemBERT",
    encoder="CamembertEncoder",
    layer="CamembertLayer",
    embeddings="CamembertEmbeddings",
)
