"""What a dashboard shows: which runs, and sections of charts by name, with no library of Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["COLUMNS", "Chart", "Request", "Section", "as_text", "layout"]

Task = Literal["classification", "mlm"]

BATCHES, REVIEWS, SECONDS = "time/batch", "time/sample", "_runtime"
_AXES = {BATCHES: "batches trained", REVIEWS: "reviews trained on", SECONDS: "seconds since the run began"}
_METRICS = {
    "classification": ("CrossEntropy", "MulticlassAccuracy"),
    "mlm": ("LanguageCrossEntropy", "MaskedAccuracy"),
}

COLUMNS = (
    "summary/samples_per_sec",
    "summary/peak_gib",
    "summary/warmup_seconds",
    "summary/accuracy",
    "summary/train_loss",
)
"""Of the table of runs: summary values, in this order."""


@dataclass
class Request:
    """The keys of the command line."""

    entity: str | None = None
    """User or team of the project; null is your own."""
    runs: list[str] | None = None
    """Names of the runs to show, as in runs=a,b; null shows all of the project."""
    kind: Literal["workspace", "report"] = "workspace"
    """A saved view of the project, or a page of its own."""
    name: str = "Arms side by side"
    """Of the view or report, at most 128 characters, without emoji or signs such as + and =."""
    group_by: list[str] = field(default_factory=lambda: ["techniques"])
    """Config keys; runs with the same values are one arm. Empty (group_by=) shows each run by itself."""
    task: Task = "classification"
    """What the runs trained (model.task)."""
    dry_run: bool = False
    """Print the layout and send nothing; needs no account."""


@dataclass(frozen=True)
class Chart:
    """Lines over the run, or with ``over: None`` a bar for each arm or run.

    Attributes:
        title: With the unit.
        metrics: As the run logs them.
        over: The metric on the x-axis.
    """

    title: str
    metrics: tuple[str, ...]
    over: str | None = None

    @property
    def axis(self) -> str:
        """What is on the x-axis, in words."""
        return "bars" if self.over is None else f"over {_AXES[self.over]}"


@dataclass(frozen=True)
class Section:
    name: str
    charts: tuple[Chart, ...]


def layout(task: Task = "classification") -> tuple[Section, ...]:
    """The sections of a dashboard, top to bottom.

    Args:
        task: What the runs trained (``model.task``); their metrics have other names. Default: classification.
    """
    loss, accuracy = _METRICS[task]
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
            "Loss and accuracy",
            (
                Chart("training loss", ("loss/train/total",), REVIEWS),
                Chart("evaluation loss", (f"metrics/eval/{loss}",), REVIEWS),
                Chart("evaluation accuracy", (f"metrics/eval/{accuracy}",), REVIEWS),
                Chart("evaluation accuracy by the clock", (f"metrics/eval/{accuracy}",), SECONDS),
                Chart("final evaluation accuracy", ("summary/accuracy",)),
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
            "What each run cost to start",
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
    """The layout for reading: a line for each chart, under its section."""
    lines = []
    for section in sections:
        lines.append(section.name)
        lines += [f"  {c.title}: {', '.join(c.metrics)} ({c.axis})" for c in section.charts]
    return "\n".join(lines)
