"""``PROJECT key=value …`` → a checked request."""

from __future__ import annotations

import typing
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.dashboards.layout import Task

__all__ = ["Request", "read_request"]


@dataclass(frozen=True)
class Request:
    """What the command line asks for; ``--help`` describes each.

    Attributes:
        entity: User or team; None is the account's own.
        runs: Their names; none shows every run of the project.
        name: Of the view or report, without emoji or signs such as + and =.
        group_by: Keys of the runs' config; runs with the same values are one arm. None shows each run by itself.
    """

    project: str
    entity: str | None = None
    runs: tuple[str, ...] = ()
    kind: Literal["workspace", "report"] = "workspace"
    name: str = "Arms side by side"
    group_by: tuple[str, ...] = ("techniques",)
    task: Task = "classification"
    dry_run: bool = False


_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": ("workspace", "report"),
    "task": typing.get_args(Task),
    "dry_run": ("true", "false"),
}
_SIGNS = ("So", "Sk", "Sm", "Sc", "Cs")  # the Unicode categories that wandb-workspaces counts as emoji


def read_request(arguments: Sequence[str]) -> Request:
    """The request behind ``PROJECT [key=value ...]``.

    Raises:
        ConfigError: One line that names the argument and the fix.
    """
    projects = [a for a in arguments if "=" not in a]
    if len(projects) != 1 or projects[0].startswith("-") or not projects[0]:
        raise ConfigError(f"PROJECT: expected one project and then key=value, not {' '.join(arguments)!r}; see --help")
    if "/" in projects[0]:
        entity, _, project = projects[0].partition("/")
        raise ConfigError(f"PROJECT: {projects[0]!r} has a slash; write {project or 'PROJECT'} entity={entity}")
    known = [field.name for field in fields(Request) if field.name != "project"]
    wanted: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            continue
        if key not in known:
            raise ConfigError(f"unknown argument {key!r}{did_you_mean(key, known)}")
        wanted[key] = _value(key, value)
    return Request(projects[0], **wanted)


def _value(key: str, text: str) -> str | bool | tuple[str, ...]:
    if key in _CHOICES and text not in _CHOICES[key]:
        raise ConfigError(f"{key}: must be {' or '.join(_CHOICES[key])}, not {text!r}")
    if key == "dry_run":
        return text == "true"
    if key in ("runs", "group_by"):
        names = tuple(text.split(",")) if text else ()
        if not all(names) or (key == "runs" and not names):
            raise ConfigError(f"{key}: {text!r} holds an empty name; write {key}=a,b")
        return names
    if not text.strip():
        raise ConfigError(f"{key}: is empty; give it a value or leave it out")
    if key == "name" and any(unicodedata.category(letter) in _SIGNS for letter in text):
        raise ConfigError(f"name: W&B takes no emoji or signs such as + and = in it; leave them out of {text!r}")
    if key == "name" and len(text) > 128:
        raise ConfigError(f"name: must be at most 128 characters, not {len(text)}")
    return text
