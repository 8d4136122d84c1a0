"""Stream training samples, so that a dataset may be larger than memory and disk."""

from __future__ import annotations

import csv
import glob
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import torch
from composer.utils import dist
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node

from composer_speedups.core.errors import ConfigError, DataError, first_line
from composer_speedups.core.files import with_working_directory
from composer_speedups.data.config import DataConfig
from composer_speedups.data.flat import Ragged
from composer_speedups.data.sources import class_names, named, unreadable
from composer_speedups.tasks.task import Task

__all__ = ["EndlessSamples", "Tokenized", "stream_of_samples"]

# File suffix → the reader of datasets and its arguments
_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t", "quoting": csv.QUOTE_NONE}),
    ".jsonl": ("json", {}),
}
_INSTALL = "pip install --no-deps mosaicml-streaming==0.13.0 && pip install Brotli catalogue python-snappy xxhash zstd"


class EndlessSamples(torch.utils.data.IterableDataset[dict[str, Any]]):
    """A stream of rows that starts over, in another order, when it ends.

    It is endless because ranks whose shares differ by a row would otherwise end at different batches and wait for each
    other.

    Args:
        rows: A ``datasets.IterableDataset``, which divides itself among DataLoader workers.
        file: ``data.train_file`` if the rows are read from files; named in errors.

    Raises:
        DataError: While iterating, if a file cannot be read.
    """

    def __init__(self, rows: Any, file: str | None = None) -> None:
        self.rows, self.file = rows, file

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, found = 0, True
        while found:  # with more workers than shards, some have no rows
            found = False
            self.rows.set_epoch(epoch)
            try:
                for row in self.rows:
                    found = True
                    yield row
            except (ValueError, pyarrow.ArrowException) as error:
                if self.file is None:
                    raise
                paths = [Path(path) for path in sorted(glob.glob(self.file, recursive=True))]
                raise unreadable(f"data.train_file: {self.file}", paths, error) from error
            epoch += 1


class Tokenized:
    """Raw rows → checked samples → token ids, then a batch from another collator. Rows with ``input_ids`` are used
    unchanged.

    Args:
        collate: Builds a batch from :class:`.Ragged` rows.
        tokenizer: The model's tokenizer.
        task: Checks and encodes the rows.
        max_length: Maximum number of tokens per sample.
        declared: Column → the class names that the dataset stores for its integers.

    Raises:
        DataError: A row without text, or with an unknown label.
    """

    def __init__(
        self, collate: Any, tokenizer: Any, task: Task, max_length: int, declared: Mapping[str, list[str]]
    ) -> None:
        self.collate, self.tokenizer, self.task, self.max_length = collate, tokenizer, task, max_length
        self.declared = dict(declared)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if "input_ids" in rows[0]:
            return self.collate(Ragged.of(self._tokenized(rows)))
        examples = [self.task.example(self._named(row), "a streamed row", training=True) for row in rows]
        columns = {key: [each[key] for each in examples] for key in examples[0]}
        return self.collate(Ragged.of(self.task.encode(columns, self.tokenizer, self.max_length)))

    def _tokenized(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        columns = {"input_ids": [list(row["input_ids"])[: self.max_length] for row in rows]}
        label = self.task.label_column
        if label is not None:
            columns["labels"] = [self.task.label(row.get(label), "a streamed row") for row in rows]
        return columns

    def _named(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, **{name: named(row.get(name), names) for name, names in self.declared.items()}}


def stream_of_samples(config: DataConfig, seed: int) -> tuple[Any, dict[str, list[str]]]:
    """Open this rank's share of the training rows. Every row belongs to one rank and one worker.

    Returns:
        The rows, and column → the class names that the dataset stores for its integers.

    Raises:
        DataError: It cannot be opened.
        ConfigError: ``source: mds`` without its package.
    """
    if config.source == "mds":
        return _mds(config, seed), {}
    file = None if config.source == "hub" else os.path.expanduser(str(config.train_file))
    try:
        if file is None:
            rows = load_dataset(
                config.hub_name,
                config.hub_config,
                split=config.train_split,
                revision=config.hub_revision,
                streaming=True,
            )
        else:
            kind, settings = _format_of(file)
            rows = load_dataset(kind, data_files=file, split="train", streaming=True, **settings)
    except DataError:
        raise
    except Exception as error:  # network, authentication, missing split: different exception classes
        where = f"data.hub_name {config.hub_name!r}, split {config.train_split!r}"
        if file is not None:
            where = f"data.train_file: {with_working_directory(file)}"
        raise DataError(f"{where} cannot be opened ({type(error).__name__}: {first_line(error)})") from error
    declared = class_names(rows.features or {})
    rows = rows.shuffle(seed=seed, buffer_size=config.shuffle_buffer)
    shared = split_dataset_by_node(rows, dist.get_global_rank(), dist.get_world_size())
    return EndlessSamples(shared, file), declared


def _format_of(name: str) -> tuple[str, dict[str, Any]]:
    kind = _FORMATS.get(Path(name).suffix)
    if kind is None:
        raise DataError(f"data.train_file: {name} must end in {', '.join(_FORMATS)}")
    return kind


def _mds(config: DataConfig, seed: int) -> Any:
    if importlib.util.find_spec("streaming") is None:
        raise ConfigError(f"data.source: mds needs the package 'streaming'; {_INSTALL}")
    from streaming import StreamingDataset

    name = str(config.train_file)
    remote = name if "://" in name else None
    local = str(Path(config.cache_dir) / "mds") if remote else str(Path(name).expanduser())
    if remote is None and not Path(local, "index.json").is_file():
        shown = with_working_directory(name)
        raise DataError(f"data.train_file: {shown} has no index.json; name a folder or address of MDS shards")
    return StreamingDataset(
        remote=remote,
        local=local,
        shuffle=True,
        shuffle_seed=seed,
        batch_size=config.batch_size // dist.get_world_size(),
    )
