"""What each task reads, minimises and reports: docs/data.md's table of tasks, which tests compare with runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TaskRow(NamedTuple):
    texts: str  # columns of texts that it reads
    label: str  # column of the label
    loss: str  # what is minimised
    metrics: Mapping[str, str]  # of an evaluation with the task's defaults, by their names in report.json
    more: str = ""  # what else may be reported


TASKS = {
    "classification": TaskRow(
        "`[text]`, or two for pairs",
        "`label`: a name or an integer",
        "cross entropy, with `model.class_weights` and `model.label_smoothing`",
        {
            "accuracy": "accuracy",
            "macro_f1": "macro F1",
            "matthews": "Matthews",
            "binary_f1": "F1 of the second of two classes",
            "loss": "",
        },
    ),
    "multilabel": TaskRow(
        "`[text]`, or two for pairs",
        "`labels`: a list of names, or text such as `billing;tech`; or `data.label_columns`, with 0 or 1 in each",
        "binary cross entropy",
        {"micro_f1": "F1 micro", "macro_f1": "F1 macro", "map": "mean average precision", "loss": ""},
    ),
    "regression": TaskRow(
        "`[text]`, or two for pairs",
        "`label`: a number",
        "mean squared error",
        {"pearson": "Pearson", "spearman": "Spearman", "rmse": "RMSE", "mae": "MAE", "loss": ""},
    ),
    "token_classification": TaskRow(
        "`[tokens]`: a list of words, or text",
        "`ner_tags`: a list of tags, one for each word",
        "cross entropy",
        {"entity_f1": "F1 of whole entities (extra `ner`)", "accuracy": "accuracy", "loss": ""},
    ),
    "reranking": TaskRow(
        "`[query, document]`, one row for each document",
        "`label`: 0 to 1, or any number with `model.loss: pairwise`",
        "binary cross entropy, or `model.loss: pairwise`",
        {"mrr@10": "MRR@10", "ndcg@10": "NDCG@10", "loss": ""},
    ),
    "embedding": TaskRow(
        "`[anchor, positive]` and any number of negatives",
        "none; a number with `model.loss: cosine` or for evaluation",
        "in-batch negatives over all ranks (`model.gradient_cache` for large batches), or `model.loss: cosine`",
        {"recall@1": "recall@1", "recall@10": "recall@10"},
        "or Spearman of scores",
    ),
    "mlm": TaskRow(
        "`[text]`",
        "none",
        "cross entropy of masked tokens (`data.whole_word_masking`, `data.packing`)",
        {"accuracy": "accuracy", "perplexity": "perplexity", "loss": ""},
    ),
}
