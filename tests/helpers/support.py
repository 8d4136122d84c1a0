"""What every task supports: described here, claimed by marked tests, and recorded when these pass.

    @pytest.mark.supports("resume", task="embedding")  # or the test's parameter ``task``; ``tasks`` for several
    @pytest.mark.refuses("predict", task="mlm")        # the test shows that it is refused in one line

``pytest -m "supports or refuses" --record-support`` writes the claims of the tests that passed to tests/supported.json,
of which ``python -m benchmarks.render`` makes the table in docs/RELIABILITY.md. ``tests/tasks/test_support.py`` holds
the file to the tests: each that needs no GPU is recorded, and is skipped nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).parents[1] / "supported.json"
MARKS = ("supports", "refuses")
Record = dict[str, dict[str, Any]]  # test → {"on": "CPU" or "GPU", "claims": [[task, way, mark], …]}

WAYS = {
    "train.py": "a run of `train.py` reports the task's metrics",
    "tune": "a search of `tune` writes a YAML that trains",
    "in code": "a Composer Trainer with `unpadding`, `fused_layers` and `fused_optimizer` has the losses and "
    "gradients of plain transformers",
    "two ranks": "DDP on two ranks gives the weights of a single process",
    "FSDP": "FSDP on two ranks gives the weights of a single process",
    "stream": "`data.streaming` gives the losses of the same rows in memory, and resumes exactly",
    "resume": "a resumed run ends with the metrics and weights of the uninterrupted run, bit for bit",
    "export": "transformers or sentence-transformers alone compute the reported metrics from the exported model",
    "predict": "`predict` writes the predictions of the exported model",
    "fast set": "on a GPU, bf16 with `unpadding`, `fused_layers`, `cuda_graphs` and `early_loss` matches plain bf16",
}


class TaskRow(NamedTuple):
    """A line of README's table of tasks and of the table in docs/RELIABILITY.md.

    Attributes:
        data: Columns that it reads.
        loss: What is minimised.
        metrics: Those of an evaluation with the task's defaults, as report.json names them, and what they are called.
        more: What else may be reported.
    """

    data: str
    loss: str
    metrics: Mapping[str, str]
    more: str = ""


TASKS = {
    "classification": TaskRow(
        "`text`, or two in `data.text_columns`; `label`, names or integers",
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
        "`text`; `labels`, a list of names or `a;b`, or 0/1 columns in `data.label_columns`",
        "binary cross entropy",
        {"micro_f1": "F1 micro", "macro_f1": "F1 macro", "map": "mean average precision", "loss": ""},
    ),
    "regression": TaskRow(
        "`text`, or two; `label`, a number",
        "mean squared error",
        {"pearson": "Pearson", "spearman": "Spearman", "loss": ""},
    ),
    "token_classification": TaskRow(
        "`tokens`; `ner_tags`, one for each word",
        "cross entropy",
        {"entity_f1": "F1 of whole entities (extra `ner`)", "accuracy": "accuracy", "loss": ""},
    ),
    "reranking": TaskRow(
        "`query`, `document`; `label`, a relevance",
        "binary cross entropy, or `model.loss: pairwise`",
        {"mrr@10": "MRR@10", "ndcg@10": "NDCG@10", "loss": ""},
    ),
    "embedding": TaskRow(
        "`anchor`, `positive`, any negatives; or two texts and a score",
        "in-batch negatives over all ranks (`model.gradient_cache` for large batches), or `model.loss: cosine`",
        {"recall@1": "recall@1", "recall@10": "recall@10"},
        "or Spearman of scores",
    ),
    "mlm": TaskRow(
        "`text`",
        "cross entropy of masked tokens (`data.whole_word_masking`, `data.packing`)",
        {"accuracy": "accuracy", "perplexity": "perplexity", "loss": ""},
    ),
}


class Claim(NamedTuple):
    task: str
    way: str
    mark: str  # of MARKS


def claims_of(item: Any) -> list[Claim]:
    """What the marks of a collected test claim.

    Raises:
        ValueError: A mark with a task or a way that is not in the tables above, or with none.
    """
    claims = []
    for kind in MARKS:
        for mark in item.iter_markers(kind):
            given = item.callspec.params.get("task") if hasattr(item, "callspec") else None
            tasks = mark.kwargs.get("tasks") or [mark.kwargs.get("task") or given]
            claims += [Claim(str(task), way, kind) for task in tasks for way in mark.args]
            if not mark.args or any(claim.task not in TASKS or claim.way not in WAYS for claim in claims):
                raise ValueError(f"{item.nodeid}: {kind} names no task or way of tests/helpers/support.py: {claims}")
    return claims


def read_record() -> Record:
    record: Record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def merged(before: Record, passed: Record) -> Record:
    """The record after a run of all marked tests: those of a GPU stay where there was none, and the other way round."""
    ran_on = {entry["on"] for entry in passed.values()}
    kept = {test: entry for test, entry in before.items() if entry["on"] not in ran_on}
    return dict(sorted({**kept, **passed}.items()))
