"""The files that the config names, and their columns, checked before the imports, which take most of the time until the
first step."""

from __future__ import annotations

import os

from composer_speedups.data.paths import find_files, is_address
from composer_speedups.tasks.data_config import DataConfig

__all__ = ["check_data_files"]


def check_data_files(config: DataConfig, *, training_labels: bool = True) -> None:
    """Refuse a missing local file, and one without a column that the config names. Streamed files, which may be large,
    and the columns that a task reads by default, which its class declares, are checked when they are read.

    Args:
        config: The keys under ``data``.
        training_labels: Whether the task reads the label column of training samples, too.

    Raises:
        DataError: Names the key, the file, and the fix.
    """
    for split, name in (("train", config.train_file), ("eval", config.eval_file)):
        key, training = f"data.{split}_file", split == "train"
        is_shards = config.source == "mds" and training
        if name is None or is_shards or is_address(name) or os.path.isdir(os.path.expanduser(name)):
            continue
        paths = find_files(name, key)
        columns = _named_columns(config, training=training, labelled=training_labels or not training)
        if columns and not (config.streaming and training):
            from composer_speedups.data.reader import check_columns_of_files  # imports pyarrow

            check_columns_of_files(paths, key, columns)


def _named_columns(config: DataConfig, *, training: bool, labelled: bool) -> list[tuple[str, str]]:
    """The columns that the config names, each with its key, as :meth:`.Task.columns` lists them with the task's own."""
    texts = config.text_columns or []
    columns = [(column, "data.text_columns") for column in (texts if training else texts[:2])]  # as for embedding
    columns += [(column, "data.label_columns") for column in config.label_columns or ()]
    named = config.label_column is not None and not config.label_columns
    return [*columns, (str(config.label_column), "data.label_column")] if named and labelled else columns
