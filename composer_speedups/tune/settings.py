"""The ``tune.*`` keys, their help, and the path of the tuned YAML, which are checked before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from composer_speedups.core.command_line import usage_as_typed
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import with_working_directory
from composer_speedups.core.settings import Settings, keys_help

__all__ = ["FIRST_LINE_START", "PREFIX", "TuneConfig", "help_text", "output_for"]

FIRST_LINE_START = "# Written by composer_speedups.tune"
"""The first line of every tuned YAML."""

PREFIX = "tune."

_USAGE = """\
usage: python -m composer_speedups.tune -f FILE [key=value ...] [tune.NAME=VALUE ...]

Measure the techniques on this machine for the run that FILE and the key=value pairs describe, and write a YAML with
the fastest set, the measured reasons, and what was left out and why. FILE itself is not changed.

exit status: 0 a YAML was written; 1 the original run fails; 2 an invalid key, config or dataset (one-line message).

keys:
"""


class TuneConfig(Settings):
    budget_seconds: float = Field(300.0, ge=1, le=604_800)
    """Seconds for all measurements; the YAML names what could not be tried in that time."""
    output: str | None = None
    """YAML to write, with all trials in a .json next to it; null for FILE's name with .tuned.yaml in the working
    directory."""
    allow: list[Literal["lower_precision", "recipe"]] | None = None
    """Which of lower_precision and recipe may change; null: lower_precision if FILE already trains in 16 bits."""
    steps: int | None = Field(None, ge=5, le=100_000)
    """Training steps per trial; null for as many as allow about twenty trials, 8 to 200."""
    repeats: int = Field(2, ge=2, le=20)
    """Runs of FILE at the start, if they fit into a third of the time, whose spread is the noise; and pairs at the
    end."""
    min_gain: float = Field(0.02, ge=0, lt=1)
    """Minimum fraction of the planned run's time that a technique must save, however small the noise."""
    batch_sizes: bool | None = None
    """In the remaining time, measure 2, 4 and 8 times the batch size; reported but never written. null: on a GPU
    only."""


def help_text() -> str:
    """The usage, and every ``tune.*`` key with its type, default, bounds and doc line."""
    usage = usage_as_typed(_USAGE)
    return f"{usage}{keys_help(TuneConfig, PREFIX)}\n\nAll other keys are those of composer train.py --help.\n"


def output_for(file: str, output: str | None) -> Path:
    """The YAML to write for the original ``file``; by default ``x.tuned.yaml`` in the working directory.

    Raises:
        ConfigError: Names ``tune.output``: it cannot be written, or would replace another file.
    """
    path = Path(output or f"{Path(file).stem}.tuned.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"tune.output: {path} does not end in .yaml; choose a name that does")
    if not os.path.isdir(path.parent):
        shown = with_working_directory(path.parent)
        raise ConfigError(f"tune.output: there is no folder {shown}; create it, or choose another")
    try:
        path.stat()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ConfigError(f"tune.output: {path} cannot be written ({error.strerror}); choose another name") from error
    if path.is_dir() or path.samefile(file):
        taken = "a folder" if path.is_dir() else "the original YAML"
        raise ConfigError(f"tune.output: {path} is {taken}; choose another")
    if not path.read_text(errors="replace").startswith(FIRST_LINE_START):
        raise ConfigError(f"tune.output: {path} exists and was not written by this command; choose another name")
    return path
