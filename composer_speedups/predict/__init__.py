"""Predict with a finished run for the rows of a file; quick to import, so that a wrong folder is noticed at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.files import TEXTS, WEIGHTS, hashes_of, model_files, with_working_directory
from composer_speedups.core.settings import fields_of
from composer_speedups.tasks.settings import TASK_FILE, TASKS, DataConfig, TaskSettings


def exported_folder(run: Path) -> Path:
    """The exported model of a run, or ``run`` itself if it is one."""
    for folder in (run, run / "model"):
        if (folder / TASK_FILE).is_file():
            return folder
    if (run / "report.json").is_file():
        raise ConfigError(f"RUN: {run} has no model/{TASK_FILE}; train with export=true")
    raise ConfigError(f"RUN: {with_working_directory(run)} is no finished run; name its folder, such as runs/NAME")


@contextlib.contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Turn errors of reading an exported model into one that names its folder."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # transformers, safetensors, tokenizers and pydantic raise different classes
        raise ConfigError(f"RUN: {folder} cannot be loaded ({first_line(error)}); train it again") from error


def read_task(folder: Path, *, evaluates: bool) -> tuple[TaskSettings, int]:
    """The settings of an exported model's task, and its maximum length."""
    with loading(folder):
        content = json.loads((folder / TASK_FILE).read_bytes())
        now = hashes_of(model_files(str(folder), (*WEIGHTS, *TEXTS)), "RUN")
        if changed := next((name for name, before in content["files"].items() if now.get(name) != before), None):
            raise ConfigError(
                f"RUN: {folder / changed} is not the file that train.py exported; restore it, or, to use the folder as "
                f"it is, remove {changed!r} from 'files' in its {TASK_FILE}"
            )
        keys = {**content["data"], **content["model"]}
        kind = TASKS[keys["task"]]
        if kind.name == "mlm" and not evaluates:
            raise ConfigError("RUN: a masked language model predicts nothing for a text; fine-tune it for a task")
        try:
            task = kind.read({key: value for key, value in keys.items() if key in fields_of(kind)})
            max_length = DataConfig.read({"max_length": keys["max_length"]}).max_length
        except ConfigError as error:
            raise ConfigError(f"RUN: {folder / TASK_FILE} is damaged ({error}); train again") from error
    return task, max_length


def choose_columns(
    task: TaskSettings, names: Collection[str], asked: Mapping[str, Any], *, evaluates: bool
) -> list[tuple[str, str]]:
    """Set the columns that a command asks for, and return the columns to read, each with the key that names it. Tasks
    that read words use the column ``text`` if ``names``, the file's columns, lack the task's default."""
    read = task.texts_of(training=False) if evaluates else task.predicted_columns
    for key, columns in asked.items():
        own = read if key == "text_columns" else getattr(task, key, None)
        if own is None:
            raise ConfigError(f"{key}: the run does not read it; remove it")
        if isinstance(columns, list) and len(columns) != len(own):
            raise ConfigError(f"{key}: the run reads {len(own)} columns, not {len(columns)}")
        setattr(task, key, columns + task.text_columns[len(own) :] if key == "text_columns" else columns)
    own = type(task).model_fields["text_columns"].default
    if task.splits_words and task.text_columns == own and own[0] not in names and "text" in names:
        task.text_columns = ["text"]
    if evaluates:
        return [(column, key.removeprefix("data.")) for column, key in task.columns(training=False)]
    return [(column, "text_columns") for column in task.predicted_columns]
