"""RoBERTa: BERT's blocks, with positions counted over the ids that are not padding."""

from __future__ import annotations

from dataclasses import replace

from composer_speedups.families import bert

FAMILY = replace(
    bert.FAMILY,
    name="roberta",
    title="RoBERTa",
    encoder="RobertaEncoder",
    layer="RobertaLayer",
    embeddings="RobertaEmbeddings",
    positions=lambda embeddings, ids_BS: embeddings.create_position_ids_from_input_ids(ids_BS, embeddings.padding_idx),
)
