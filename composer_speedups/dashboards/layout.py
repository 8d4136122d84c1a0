"""The content of a dashboard: its runs, and the sections of charts of ``layout.yaml``; without W&B's libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field

from composer_speedups.core.settings import Settings

Task = Literal["classification", "multilabel", "regression", "token_classification", "reranking", "embedding", "mlm"]
_LAYOUT: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("layout.yaml").read_text())


class Request(Settings):
    entity: str | None = None
    """User or team of the project; null for your default."""
    runs: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the runs to show, as in runs=a,b; null for all runs of the project."""
    name: str = "Runs side by side"
    """Name of the view: at most 128 characters, without emoji or signs such as + and =."""
    group_by: list[str] = Field(default_factory=lambda: ["techniques"])
    """Config keys; runs with the same values form a group. Empty (group_by=) shows each run separately."""
    task: Task = "classification"
    """Task of the runs (model.task)."""
    dry_run: bool = False
    """Print the layout without sending it; needs no account."""


class Chart(NamedTuple):
    """Lines over the run, or with ``over: None`` a bar per group or run."""

    title: str  # with the unit
    metrics: tuple[str, ...]  # names of the logged metrics
    over: str | None = None  # the metric on the x-axis

    @property
    def axis(self) -> str:
        return "bars" if self.over is None else f"over {_LAYOUT['axes'][self.over]}"


class Section(NamedTuple):
    name: str
    charts: tuple[Chart, ...]


def layout(task: Task = "classification") -> tuple[Section, ...]:
    """The sections of a dashboard from top to bottom, with the metrics of a task."""
    scores = _scores(task)
    return tuple(
        Section(name, tuple(_chart(c, s) for c in charts for s in (scores if c.get("each_score") else scores[:1])))
        for name, charts in _LAYOUT["sections"].items()
    )


def columns(task: Task = "classification") -> tuple[str, ...]:
    """Columns of the table of runs: summary values, in this order."""
    return tuple(column.format(**_scores(task)[0]) for column in _LAYOUT["columns"])


def _scores(task: Task) -> list[dict[str, str]]:
    """The evaluation metrics of a task; runs are compared by the first one."""
    return [dict(zip(("title", "logged", "summary"), score, strict=True)) for score in _LAYOUT["scores"][task]]


def _chart(chart: dict[str, Any], score: dict[str, str]) -> Chart:
    metrics = tuple(metric.format(**score) for metric in chart["metrics"])
    return Chart(chart["title"].format(**score), metrics, chart.get("over"))


def as_text(sections: Sequence[Section]) -> str:
    """The layout as text: a line per chart, below its section."""
    lines = []
    for section in sections:
        lines.append(section.name)
        lines += [f"  {chart.title}: {', '.join(chart.metrics)} ({chart.axis})" for chart in section.charts]
    return "\n".join(lines)
