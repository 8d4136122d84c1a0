"""python -m composer_speedups.dashboards PROJECT [key=value ...]; see ``--help``."""

from __future__ import annotations

import importlib.util
import sys
import unicodedata
from collections.abc import Sequence

from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.settings import keys_help
from composer_speedups.dashboards.layout import Request, Section, as_text, layout
from composer_speedups.train.cli import exit_codes

_USAGE = """\
usage: composer-speedups-dashboards PROJECT [key=value ...]

Create a Weights & Biases dashboard that compares runs, which must log with loggers.wandb={}.
It needs pip install '.[dashboards]' in a clone and `wandb login`.

keys:
"""
_EMOJI_CATEGORIES = ("So", "Sk", "Sm", "Sc", "Cs")  # Unicode categories that wandb-workspaces treats as emoji


def main(arguments: Sequence[str]) -> None:
    """Read the arguments, then print the layout, or send it and print its address."""
    project, request = read_request(arguments)
    sections = layout(request.task)
    if request.dry_run:
        runs = ", ".join(request.runs or ["all runs"])
        configurations = ", ".join(request.group_by) or "nothing"
        print(f"{request.kind} {request.name!r} of {project}: {runs}, grouped by {configurations}")
        print(as_text(sections))
        return
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError(
            f"kind: a {request.kind} needs the package wandb-workspaces; pip install '.[dashboards]' in a clone, "
            "or add dry_run=true to see the layout"
        )
    print(_send(project, request, sections))


def read_request(arguments: Sequence[str]) -> tuple[str, Request]:
    """Read the project and the keys of ``PROJECT [key=value ...]``; ``--help`` prints every key and exits with 0.

    Raises:
        ConfigError: Names the argument and the fix.
    """
    command_line = parse_command_line(arguments, "PROJECT")
    if command_line.help:
        print(_USAGE + keys_help(Request))
        raise SystemExit(0)
    (project,) = command_line.words
    entity, slash, name = project.partition("/")
    if slash:
        raise ConfigError(f"PROJECT: {project!r} contains a slash; write {name or 'PROJECT'} entity={entity}")
    request, _ = read_settings(Request, command_line.overrides)
    if request.runs == []:
        raise ConfigError("runs: names no run; write runs=a,b")
    if any(unicodedata.category(letter) in _EMOJI_CATEGORIES for letter in request.name):
        raise ConfigError(
            f"name: W&B does not accept emoji or signs such as + and =; remove them from {request.name!r}"
        )
    if len(request.name) > 128:
        raise ConfigError(f"name: must be at most 128 characters, not {len(request.name)}")
    return project, request


def _send(project: str, request: Request, sections: Sequence[Section]) -> str:
    """Save the dashboard under the user's account, and return its address."""
    import wandb  # imported here, because it takes a second and wandb-workspaces is an extra

    from composer_speedups.dashboards.build import build_report, build_workspace

    build = build_workspace if request.kind == "workspace" else build_report
    try:
        entity = request.entity or wandb.Api().default_entity
        if entity is None:
            raise ConfigError("entity: this account has no default user or team; add entity=NAME")
        return str(build(sections, request, entity, project).save().url)
    except ConfigError:
        raise
    except Exception as error:  # the service's errors have no common public class
        where = f"{request.entity or 'your account'}/{project}"
        raise ConfigError(f"entity: W&B did not accept the {request.kind} for {where}: {error}") from error


def command() -> None:
    """Entry point of ``python -m composer_speedups.dashboards`` and its console command."""
    with exit_codes("dashboards"):
        main(sys.argv[1:])


if __name__ == "__main__":
    command()
