"""The files that the config names, and their columns, checked before the imports, which take most of the time until the
first step."""

from __future__ import annotations

import os

from composer_speedups.data.paths import find_files, is_address
from composer_speedups.tasks.data_config import DataConfig
from composer_speedups.tasks.settings import TaskSettings


def check_data_files(data: DataConfig, task: TaskSettings) -> None:
    """Refuse a missing local file, and one without a column that the task reads. Of files that are streamed, which may
    be many and large, the first row is read.

    Args:
        data: The keys under ``data``.
        task: The task that reads them.

    Raises:
        DataError: Names the key, the file, and the fix.
    """
    for split, name in (("train", data.train_file), ("eval", data.eval_file)):
        key, training = f"data.{split}_file", split == "train"
        if name is None or is_address(name) or (data.source == "mds" and training):
            continue
        folder = os.path.isdir(os.path.expanduser(name))
        paths = [name] if folder else find_files(name, key)
        from composer_speedups.data.reader import check_columns, names_of_columns, saved_dataset  # imports pyarrow

        columns, streamed = task.columns(training=training), data.streaming and training
        for path in paths[:1] if streamed else paths:
            wanted = () if streamed else [column for column, _ in columns]
            names = saved_dataset(name, key).column_names if folder else names_of_columns(path, key, wanted)
            tokens = streamed and "input_ids" in names  # which are read in place of texts
            needed = [(column, setting) for column, setting in columns if not (tokens and "text" in setting)]
            if names:  # there are rows
                check_columns(names, needed, f"{key}: {path}")
