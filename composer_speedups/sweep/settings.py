"""The settings of tune and repeat, which are checked before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import with_working_directory
from composer_speedups.core.settings import Settings

PREFIX = "tune."
FIRST_LINE_START = "# Written by composer-speedups-tune"
"""The first line of every tuned YAML."""

_MAX = 1000  # numbers in a range


def numbers(items: Sequence[object]) -> list[int]:
    """The numbers in a list of numbers and ranges such as ``1..5``, each one once."""
    found: list[int] = []
    for item in map(str, items):
        ends = re.fullmatch(r"(\d{1,10})(?:\.\.(\d{1,10}))?", item)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if not 0 <= last - first < _MAX:
            raise ValueError(f"must be numbers or ranges of at most {_MAX}, such as 1..5 or 1,2,7, not {item!r}")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


class RepeatConfig(Settings):
    seeds: Annotated[list[int], BeforeValidator(numbers)] = Field([1, 2, 3, 4, 5], min_length=1)
    """Seeds to train every file with: 1..5, or 1,2,7."""
    processes: int | None = Field(None, ge=1, le=1024)
    """Runs at a time, which share the GPUs; null for one on each visible GPU, or one without a GPU."""


class TuneConfig(Settings):
    budget_seconds: float = Field(300.0, ge=1, le=604_800)
    """Seconds for all measurements; the YAML names what could not be tried in that time."""
    output: str | None = None
    """YAML to write, with all trials in a .json next to it; null for FILE's name with .tuned.yaml in the working
    directory."""
    allow: list[Literal["lower_precision", "recipe"]] | None = None
    """Which of lower_precision and recipe may change; null: lower_precision if FILE already trains in 16 bits."""
    steps: int | None = Field(None, ge=5, le=100_000)
    """Training steps per trial; null for as many as let all sets be tried in the budget, 8 to 200."""
    repeats: int = Field(2, ge=2, le=20)
    """How often FILE and the fastest set are run again in turns; their spread is the noise."""


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
        ours = path.read_text(errors="replace").startswith(FIRST_LINE_START)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ConfigError(f"tune.output: {path} cannot be written ({error.strerror}); choose another name") from error
    if path.samefile(file):
        raise ConfigError(f"tune.output: {path} is the original YAML; choose another")
    if not ours:
        raise ConfigError(f"tune.output: {path} exists and was not written by this command; choose another name")
    return path
