"""The folder of a finished run. Importing this module is quick, so that a wrong folder is noticed at once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import with_working_directory

__all__ = ["RunFiles", "check_run"]


class RunFiles(NamedTuple):
    report: Path
    model_config: Path  # of the exported model


def check_run(run: Path) -> RunFiles:
    """The files of a run that training has finished and exported.

    Raises:
        ConfigError: Names the missing file and the fix.
    """
    files = RunFiles(run / "report.json", run / "model" / "config.json")
    if not run.is_dir():
        raise ConfigError(f"RUN: {with_working_directory(run)} is not a folder; name a run's folder, such as runs/NAME")
    if not files.report.is_file():
        raise ConfigError(f"RUN: {run} has no report.json, so its training has not finished; name a finished run")
    if not files.model_config.is_file():
        raise ConfigError(f"RUN: {run} has no model/; train with export=true")
    return files
