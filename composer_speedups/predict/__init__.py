"""Predict with a finished run for the rows of a file; quick to import, so that a wrong folder is noticed at once."""

from __future__ import annotations

from pathlib import Path

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import with_working_directory
from composer_speedups.tasks.settings import TASK_FILE


def exported_folder(run: Path) -> Path:
    """The exported model of a run, or ``run`` itself if it is one."""
    for folder in (run, run / "model"):
        if (folder / TASK_FILE).is_file():
            return folder
    if (run / "report.json").is_file():
        raise ConfigError(f"RUN: {run} has no model/{TASK_FILE}; train with export=true")
    raise ConfigError(f"RUN: {with_working_directory(run)} is no finished run; name its folder, such as runs/NAME")
