"""ELECTRA: BERT's blocks, embeddings of a different width, and a head that detects replaced tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from composer_speedups.families import bert
from composer_speedups.families.family import Reads, default_head_reads


def _reads(model_class: str, config: Any) -> Reads:
    # Its discriminator's loss uses the attention mask.
    if model_class.endswith("ElectraForPreTraining"):
        return Reads.REAL_TOKENS
    return default_head_reads(model_class, config)


FAMILY = replace(
    bert.FAMILY,
    name="electra",
    title="ELECTRA",
    encoder="ElectraEncoder",
    layer="ElectraLayer",
    embeddings="ElectraEmbeddings",
    around_blocks=("ElectraModel.embeddings_project",),
    reads=_reads,
    embedding="embedding_size",
)
