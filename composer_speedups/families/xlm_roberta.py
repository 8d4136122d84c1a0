"""XLM-RoBERTa: RoBERTa's modules under different names."""

from __future__ import annotations

from dataclasses import replace

from composer_speedups.families import roberta

FAMILY = replace(
    roberta.FAMILY,
    name="xlm_roberta",
    title="XLM-RoBERTa",
    encoder="XLMRobertaEncoder",
    layer="XLMRobertaLayer",
    embeddings="XLMRobertaEmbeddings",
)
