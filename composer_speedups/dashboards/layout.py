"""The content of a dashboard: its runs, and sections of charts, independent of Weights & Biases' libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from composer_speedups.core.settings import Settings

__all__ = ["Chart", "Request", "Section", "as_text", "columns", "layout"]

Task = Literal["classification", "multilabel", "regression", "token_classification", "reranking", "embedding", "mlm"]

BATCHES, SAMPLES, SECONDS = "time/batch", "time/sample", "_runtime"
_AXES = {BATCHES: "batches trained", SAMPLES: "samples trained on", SECONDS: "seconds since the start of the run"}

# Task → its evaluation metrics: title in charts, name in the log, and name in the summary. Runs are compared by the
# first one.
_METRICS: dict[Task, tuple[tuple[str, str, str], ...]] = {
    "classification": (
        ("accuracy", "MulticlassAccuracy", "accuracy"),
        ("loss", "CrossEntropy", "loss"),
        ("macro F1", "MacroF1", "macro_f1"),
        ("Matthews correlation", "MatthewsCorrelation", "matthews"),
        ("F1 of the second of two classes", "BinaryF1", "binary_f1"),
    ),
    "multilabel": (
        ("micro F1", "MicroF1", "micro_f1"),
        ("loss", "BinaryCrossEntropy", "loss"),
        ("macro F1", "MacroF1", "macro_f1"),
        ("mean average precision", "MeanAveragePrecision", "map"),
    ),
    "regression": (
        ("Spearman correlation", "SpearmanCorrCoef", "spearman"),
        ("loss", "MeanSquaredError", "loss"),
        ("Pearson correlation", "PearsonCorrCoef", "pearson"),
    ),
    "token_classification": (
        ("entity F1", "EntityF1", "entity_f1"),
        ("loss", "LanguageCrossEntropy", "loss"),
        ("accuracy", "MaskedAccuracy", "accuracy"),
    ),
    "reranking": (
        ("NDCG@10", "NDCG@10", "ndcg@10"),
        ("loss", "BinaryCrossEntropy", "loss"),
        ("MRR@10", "MRR@10", "mrr@10"),
    ),
    "embedding": (
        ("recall@10", "Recall@10", "recall@10"),
        ("recall@1", "Recall@1", "recall@1"),
        ("Spearman correlation", "SpearmanCorrCoef", "spearman"),
    ),
    "mlm": (
        ("accuracy", "MaskedAccuracy", "accuracy"),
        ("loss", "LanguageCrossEntropy", "loss"),
        ("perplexity", "LanguagePerplexity", "perplexity"),
    ),
}


def columns(task: Task = "classification") -> tuple[str, ...]:
    """Columns of the table of runs: summary values, in this order."""
    measured = ("samples_per_sec", "peak_gib", "warmup_seconds", _METRICS[task][0][2], "train_loss")
    return tuple(f"summary/{name}" for name in measured)


class Request(Settings):
    """The keys of the command line."""

    entity: str | None = None
    """User or team of the project; null for your default."""
    runs: list[str] | None = None
    """Names of the runs to show, as in runs=a,b; null for all runs of the project."""
    kind: Literal["workspace", "report"] = "workspace"
    """A saved view of the project, or a separate report."""
    name: str = "Runs side by side"
    """Name of the view or report: at most 128 characters, without emoji or signs such as + and =."""
    group_by: list[str] = Field(default_factory=lambda: ["techniques"])
    """Config keys; runs with the same values form a group. Empty (group_by=) shows each run separately."""
    task: Task = "classification"
    """Task of the runs (model.task)."""
    dry_run: bool = False
    """Print the layout without sending it; needs no account."""


@dataclass(frozen=True)
class Chart:
    """Lines over the run, or with ``over: None`` a bar per group or run.

    Attributes:
        title: With the unit.
        metrics: Names of the logged metrics.
        over: The metric on the x-axis.
    """

    title: str
    metrics: tuple[str, ...]
    over: str | None = None

    @property
    def axis(self) -> str:
        """A description of the x-axis."""
        return "bars" if self.over is None else f"over {_AXES[self.over]}"


@dataclass(frozen=True)
class Section:
    name: str
    charts: tuple[Chart, ...]


def layout(task: Task = "classification") -> tuple[Section, ...]:
    """The sections of a dashboard from top to bottom.

    Args:
        task: Task of the runs (``model.task``), which determines their metrics. Default: classification.
    """
    scores = _METRICS[task]
    title, score, final = scores[0]
    return (
        Section(
            "Speed",
            (
                Chart("samples/s", ("throughput/samples_per_sec",), BATCHES),
                Chart("real tokens/s", ("throughput/tokens_per_sec",), BATCHES),
                Chart("waiting for data, fraction of the time", ("throughput/data_wait_fraction",), BATCHES),
                Chart("samples/s, steady state", ("summary/samples_per_sec",)),
            ),
        ),
        Section(
            "Loss and scores",
            (
                Chart("training loss", ("loss/train/total",), SAMPLES),
                *(Chart(f"evaluation {name}", (f"metrics/eval/{logged}",), SAMPLES) for name, logged, _ in scores),
                Chart(f"evaluation {title} over time", (f"metrics/eval/{score}",), SECONDS),
                Chart(f"final evaluation {title}", (f"summary/{final}",)),
            ),
        ),
        Section(
            "Memory",
            (
                Chart("peak, GiB", ("memory/peak_gib",), BATCHES),
                Chart("activations, GiB", ("memory/activations_gib",), BATCHES),
                Chart("peak of the whole run, GiB", ("summary/peak_gib",)),
                Chart("weights, gradients and optimizer, GiB", tuple(f"memory/{p}_gib" for p in _PARTS)),
            ),
        ),
        Section(
            "Start-up time of each run",
            (
                Chart("warm-up and compilation, s", ("summary/warmup_seconds",)),
                Chart("start of the process to the first trained step, s", ("startup/to_first_step_seconds",)),
                Chart("parts of the start, s", tuple(f"startup/{phase}_seconds" for phase in _PHASES)),
                Chart("evaluations, s in all", ("summary/eval_seconds",)),
            ),
        ),
    )


_PARTS = ("weights", "gradients", "optimizer")
_PHASES = ("imports", "data", "model", "trainer", "first_step")


def as_text(sections: Sequence[Section]) -> str:
    """The layout as text: a line per chart, below its section."""
    lines = []
    for section in sections:
        lines.append(section.name)
        lines += [f"  {c.title}: {', '.join(c.metrics)} ({c.axis})" for c in section.charts]
    return "\n".join(lines)
