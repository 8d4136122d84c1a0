"""python -m composer_speedups.dashboards PROJECT [key=value ...]; see ``--help``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.settings import keys_help
from composer_speedups.dashboards.layout import Chart, Request, Section, as_text, columns, layout
from composer_speedups.train.cli import exit_codes

_USAGE = """\
usage: composer-speedups-dashboards PROJECT [key=value ...]

Save a Weights & Biases workspace that compares runs, which must log with loggers.wandb={}.
It needs pip install '.[dashboards]' in a clone and `wandb login`.

keys:
"""


def main(arguments: Sequence[str]) -> None:
    """Read the arguments, then print the layout, or save a workspace and print its address."""
    project, request = read_request(arguments)
    if request.dry_run:
        runs, groups = ", ".join(request.runs or ["all runs"]), ", ".join(request.group_by) or "nothing"
        print(f"{request.name!r} of {project}: {runs}, grouped by {groups}\n{as_text(layout(request.task))}")
        return
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError(
            "dashboards need the package wandb-workspaces; pip install '.[dashboards]' in a clone, or add dry_run=true "
            "to see the layout"
        )
    import wandb  # imported here, because it takes a second and wandb-workspaces is an extra

    try:
        entity = request.entity or wandb.Api().default_entity
        if entity is None:
            raise ConfigError("entity: this account has no default user or team; add entity=NAME")
        print(build_workspace(layout(request.task), request, entity, project).save().url)
    except ConfigError:
        raise
    except Exception as error:  # the service's errors have no common public class
        where = f"{request.entity or 'your account'}/{project}"
        raise ConfigError(f"entity: W&B did not accept the workspace for {where}: {error}") from error


def build_workspace(sections: Sequence[Section], request: Request, entity: str, project: str) -> Any:
    """A workspace whose panels are the charts, with grouped runs."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces
    from wandb_workspaces import expr

    def panel(chart: Chart) -> reports.LinePlot | reports.BarPlot:
        if chart.over is None:
            return reports.BarPlot(title=chart.title, metrics=list(chart.metrics))
        title_x = chart.axis.removeprefix("over ")
        return reports.LinePlot(title=chart.title, x=chart.over, y=list(chart.metrics), title_x=title_x)

    shown = [workspaces.Section(name=name, panels=[*map(panel, charts)], is_open=True) for name, charts in sections]
    grouped: list[Any] = [expr.Config(key) for key in request.group_by]
    keys = [key.partition(".") for key in request.group_by]  # in W&B, the value of `data` contains `batch_size`
    configured = [f"config:{section}.value{dot}{rest}" for section, dot, rest in keys]
    summaries = [f"summary:{column}" for column in columns(request.task)]
    runs = workspaces.RunsetSettings(
        groupby=grouped,
        filters=[expr.Metric("Name").isin(list(request.runs))] if request.runs else [],
        pinned_columns=["run:displayName", *configured, *summaries],
    )
    return workspaces.Workspace(entity=entity, project=project, name=request.name, sections=shown, runset_settings=runs)


def read_request(arguments: Sequence[str]) -> tuple[str, Request]:
    """Read the project and the keys of ``PROJECT [key=value ...]``; ``--help`` prints every key and exits with 0."""
    command_line = parse_command_line(arguments, "PROJECT", help=lambda: _USAGE + keys_help(Request))
    (project,) = command_line.words
    return project, read_settings(Request, command_line.overrides)[0]


def command() -> None:
    with exit_codes("dashboards"):
        main(sys.argv[1:])


if __name__ == "__main__":
    command()
