"""Convert a layout to objects of ``wandb-workspaces``, without sending them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces
from wandb_workspaces import expr

from composer_speedups.dashboards.layout import Chart, Request, Section, columns

__all__ = ["build_report", "build_workspace"]

_WIDTH, _HEIGHT = 8, 6  # width of a panel in a report, whose grid has 24 columns


def build_workspace(sections: Sequence[Section], request: Request, entity: str, project: str) -> workspaces.Workspace:
    """A workspace whose panels are the charts, with grouped runs.

    Args:
        sections: From :func:`layout`.
        request: The runs, their grouping, and the name.
        entity: User or team.
        project: Name of the project.
    """
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=request.name,
        sections=[
            workspaces.Section(name=section.name, panels=[*map(_panel, section.charts)], is_open=True)
            for section in sections
        ],
        runset_settings=workspaces.RunsetSettings(
            filters=_only(request.runs),
            groupby=[expr.Config(key) for key in request.group_by],
            pinned_columns=_columns(request),
        ),
    )


def build_report(sections: Sequence[Section], request: Request, entity: str, project: str) -> reports.Report:
    """A report with a heading and a grid of panels per section; arguments as in :func:`build_workspace`."""
    blocks: list[Any] = []
    for section in sections:
        runset = reports.Runset(
            entity=entity,
            project=project,
            name="runs",
            filters=_only(request.runs),
            groupby=[f"config.{key}" for key in request.group_by],
            pinned_columns=_columns(request),
        )
        panels: list[Any] = [_panel(chart) for chart in section.charts]
        for i, panel in enumerate(panels):
            panel.layout = reports.Layout(x=i % 3 * _WIDTH, y=i // 3 * _HEIGHT, w=_WIDTH, h=_HEIGHT)
        blocks += [reports.H2(section.name), reports.PanelGrid(runsets=[runset], panels=panels)]
    return reports.Report(entity=entity, project=project, title=request.name, blocks=blocks, width="fluid")


def _panel(chart: Chart) -> reports.LinePlot | reports.BarPlot:
    if chart.over is None:
        return reports.BarPlot(title=chart.title, metrics=list(chart.metrics))
    title_x = chart.axis.removeprefix("over ")
    return reports.LinePlot(title=chart.title, x=chart.over, y=list(chart.metrics), title_x=title_x)


def _only(runs: Sequence[str] | None) -> list[expr.FilterExpr]:
    return [expr.Metric("Name").isin(list(runs))] if runs else []


def _columns(request: Request) -> list[str]:
    return [
        "run:displayName",
        *(f"config:{_stored(key)}" for key in request.group_by),
        *(f"summary:{c}" for c in columns(request.task)),
    ]


def _stored(key: str) -> str:
    """The name of a config key in W&B: the value of ``data`` contains ``batch_size``."""
    first, *rest = key.split(".")
    return ".".join([first, "value", *rest])
