"""python -m composer_speedups.dashboards PROJECT [key=value ...]: a Weights & Biases dashboard that compares runs.

    entity=NAME        user or team of the project; your own by default
    runs=a,b           names of the runs to show; all of the project's by default
    kind=workspace     a saved view of the project, or report: a page of its own
    name=TEXT          of the view or the report; "Arms side by side" by default
    group_by=KEY,KEY   config keys that make an arm, as in techniques,data.batch_size; techniques by default,
                       nothing (group_by=) shows each run by itself
    task=classification  what the runs trained, or mlm
    dry_run=true       print the layout and send nothing; needs no account

Runs log what it shows with loggers.wandb={}. It needs pip install 'composer_speedups[dashboards]' and `wandb login`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from composer_speedups.core.errors import ConfigError
from composer_speedups.dashboards.layout import Section, as_text, layout
from composer_speedups.dashboards.request import Request, read_request
from composer_speedups.train.cli import exit_codes

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Read the arguments, then print the layout or send it and print its address."""
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return
    request = read_request(arguments)
    sections = layout(request.task)
    if request.dry_run:
        runs = ", ".join(request.runs) or "all runs"
        arms = ", ".join(request.group_by) or "nothing"
        print(f"{request.kind} {request.name!r} of {request.project}: {runs}, grouped by {arms}")
        print(as_text(sections))
        return
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError(
            f"kind: a {request.kind} needs the package wandb-workspaces; pip install 'composer_speedups[dashboards]', "
            "or add dry_run=true to see the layout"
        )
    print(_send(request, sections))


def _send(request: Request, sections: Sequence[Section]) -> str:
    """Save the dashboard under the user's account; its address."""
    import wandb

    from composer_speedups.dashboards.build import build_report, build_workspace

    build = build_workspace if request.kind == "workspace" else build_report
    try:
        entity = request.entity or wandb.Api().default_entity
        if entity is None:
            raise ConfigError("entity: this account has no default user or team; add entity=NAME")
        return str(build(sections, request, entity).save().url)
    except ConfigError:
        raise
    except Exception as error:  # what the service refuses has no common public class
        where = f"{request.entity or 'your account'}/{request.project}"
        raise ConfigError(f"entity: W&B did not take the {request.kind} for {where}: {error}") from error


if __name__ == "__main__":
    with exit_codes("dashboards"):
        main(sys.argv[1:])
