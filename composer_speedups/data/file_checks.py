"""The files that the config names, and their columns, checked before the imports, which take most of the time until the
first step."""

from __future__ import annotations

import os

from composer_speedups.data.paths import find_files, is_address
from composer_speedups.tasks.config import ModelConfig
from composer_speedups.tasks.data_config import DEFAULT_COLUMNS, DataConfig

__all__ = ["check_data_files", "columns_read"]


def check_data_files(data: DataConfig, model: ModelConfig) -> None:
    """Refuse a missing local file, and one without a column that the task reads. Of files that are streamed, which may
    be many and large, the first row is read.

    Args:
        data: The keys under ``data``.
        model: The keys under ``model``, which name the task.

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

        columns, streamed = columns_read(data, model, training=training), data.streaming and training
        for path in paths[:1] if streamed else paths:
            wanted = () if streamed else [column for column, _ in columns]
            names = saved_dataset(name, key).column_names if folder else names_of_columns(path, key, wanted)
            tokens = streamed and "input_ids" in names  # which are read in place of texts
            needed = [(column, setting) for column, setting in columns if not (tokens and "text" in setting)]
            if names:  # there are rows
                check_columns(names, needed, f"{key}: {path}")


def columns_read(data: DataConfig, model: ModelConfig, *, training: bool) -> list[tuple[str, str]]:
    """The columns of :meth:`.Task.columns`, each with the config key that names it, without importing the task."""
    texts, label = DEFAULT_COLUMNS[model.task]
    texts, label = data.text_columns or texts, data.label_column or label
    columns = [(column, "data.text_columns") for column in (texts if training else texts[:2])]  # as for embedding
    if data.label_columns:
        return [*columns, *((column, "data.label_columns") for column in data.label_columns)]
    in_batch_negatives = model.task == "embedding" and model.loss != "cosine"
    if label is None or (training and in_batch_negatives):
        return columns
    several = ", or data.label_columns for columns of 0 and 1" if model.task == "multilabel" else ""
    return [*columns, (label, f"data.label_column{several}")]
