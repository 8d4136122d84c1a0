"""The folder of a finished run. Importing this module is quick, so that a wrong folder is noticed at once."""

from __future__ import annotations

import os
from pathlib import Path

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import with_working_directory
from composer_speedups.tasks.settings import TASK_FILE


def exported_folder(run: Path) -> Path:
    """The exported model of a run, or ``run`` itself if it is one.

    Raises:
        ConfigError: There is none; names the folder and the fix.
    """
    if not os.path.isdir(run):  # Path.is_dir raises an error for a name that is too long
        raise ConfigError(f"RUN: {with_working_directory(run)} is not a folder; name a run's folder, such as runs/NAME")
    for folder in (run, run / "model"):
        if (folder / TASK_FILE).is_file():
            return folder
    if (run / "report.json").is_file() and not (run / "model").is_dir():
        raise ConfigError(f"RUN: {run} has no model/; train with export=true")
    for folder in (run, run / "model"):
        if (folder / "config.json").is_file():
            raise ConfigError(f"RUN: {folder} has no {TASK_FILE}, which train.py writes beside a model; train it again")
    raise ConfigError(f"RUN: {run} has no model/, so its training has not finished; name a finished run")
