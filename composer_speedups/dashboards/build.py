"""Convert a layout to objects of ``wandb-workspaces``, without sending them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces
from wandb_workspaces import expr

from composer_speedups.dashboards.layout import Chart, Request, Section, columns

_WIDTH, _HEIGHT = 8, 6  # width of a panel in a report, whose grid has 24 columns


def build_workspace(sections: Sequence[Section], request: Request, entity: str, project: str) -> workspaces.Workspace:
    """A workspace whose panels are the charts, with grouped runs.

    Args:
        sections: From :func:`layout`.
        request: The runs, their grouping, and the name.
        entity: User or team.
        project: Name of the project.
    """
    shown = [workspaces.Section(name=name, panels=[*map(_panel, charts)], is_open=True) for name, charts in sections]
    grouped: list[Any] = [expr.Config(key) for key in request.group_by]
    runs = workspaces.RunsetSettings(groupby=grouped, **_runs(request))
    return workspaces.Workspace(entity=entity, project=project, name=request.name, sections=shown, runset_settings=runs)


def build_report(sections: Sequence[Section], request: Request, entity: str, project: str) -> reports.Report:
    """A report with a heading and a grid of panels per section; arguments as in :func:`build_workspace`."""
    grouped = [f"config.{key}" for key in request.group_by]
    blocks: list[Any] = []
    for name, charts in sections:
        runset = reports.Runset(entity=entity, project=project, name="runs", groupby=grouped, **_runs(request))
        panels: list[Any] = [*map(_panel, charts)]
        for i, panel in enumerate(panels):
            panel.layout = reports.Layout(x=i % 3 * _WIDTH, y=i // 3 * _HEIGHT, w=_WIDTH, h=_HEIGHT)
        blocks += [reports.H2(name), reports.PanelGrid(runsets=[runset], panels=panels)]
    return reports.Report(entity=entity, project=project, title=request.name, blocks=blocks, width="fluid")


def _panel(chart: Chart) -> reports.LinePlot | reports.BarPlot:
    if chart.over is None:
        return reports.BarPlot(title=chart.title, metrics=list(chart.metrics))
    title_x = chart.axis.removeprefix("over ")
    return reports.LinePlot(title=chart.title, x=chart.over, y=list(chart.metrics), title_x=title_x)


def _runs(request: Request) -> dict[str, Any]:
    """The runs that are shown, and the columns of their table."""
    filters = [expr.Metric("Name").isin(list(request.runs))] if request.runs else []
    keys = [key.partition(".") for key in request.group_by]  # in W&B, the value of `data` contains `batch_size`
    configured = [f"config:{section}.value{dot}{rest}" for section, dot, rest in keys]
    summaries = [f"summary:{column}" for column in columns(request.task)]
    return {"filters": filters, "pinned_columns": ["run:displayName", *configured, *summaries]}
