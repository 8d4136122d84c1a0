"""Training reviews read as training goes: a dataset may be larger than memory and than the disk."""

from __future__ import annotations

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
from composer_speedups.data.sources import unreadable

__all__ = ["EndlessReviews", "Tokenized", "stream_of_reviews"]

_FORMATS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json"}
_INSTALL = "pip install --no-deps mosaicml-streaming==0.13.0 && pip install Brotli python-snappy xxhash zstd"


class EndlessReviews(torch.utils.data.IterableDataset[dict[str, Any]]):
    """A stream of rows that begins anew, in another order, when it is over.

    It has no end, because ranks whose shares differ by a row would end at different batches and wait for each other.

    Args:
        rows: A ``datasets.IterableDataset``; it shares itself out over the workers of a DataLoader.
        file: ``data.train_file``, where the rows are read from files; named in errors.

    Raises:
        DataError: While iterating, for a file that cannot be read.
    """

    def __init__(self, rows: Any, file: str | None = None) -> None:
        self.rows, self.file = rows, file

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, found = 0, True
        while found:  # a worker beyond the number of shards has no rows at all
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
    """Rows of text → token ids, then the batch of another collator. Rows with ``input_ids`` pass as they are.

    Args:
        collate: Makes a batch of rows with ``input_ids`` and ``label``.
        tokenizer: Of the model.
        config: Names of the columns, and the length that reviews are cut to.

    Raises:
        DataError: A row without text, or with a label other than 0 and 1.
    """

    def __init__(self, collate: Any, tokenizer: Any, config: DataConfig) -> None:
        self.collate, self.tokenizer, self.config = collate, tokenizer, config

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if "input_ids" in rows[0]:
            ids = [list(row["input_ids"])[: self.config.max_length] for row in rows]
        else:
            ids = self.tokenizer([self._text(row) for row in rows], truncation=True, max_length=self.config.max_length)[
                "input_ids"
            ]
        labels = [self._label(row) for row in rows]
        return self.collate([{"input_ids": i, "label": label} for i, label in zip(ids, labels, strict=True)])

    def _text(self, row: Mapping[str, Any]) -> str:
        text = row.get(self.config.text_column)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"a streamed row has {text!r:.60} as data.text_column {self.config.text_column!r}, no text")
        return text

    def _label(self, row: Mapping[str, Any]) -> int:
        label = row.get(self.config.label_column)
        if label is None or label not in (0, 1):
            raise DataError(
                f"a streamed row has {label!r:.60} as data.label_column {self.config.label_column!r}; it must be 0 or 1"
            )
        return int(label)


def stream_of_reviews(config: DataConfig, seed: int) -> Any:
    """This rank's share of the training rows; every row goes to one rank and one worker.

    Raises:
        DataError: It cannot be opened.
        ConfigError: ``source: mds`` without its package.
    """
    if config.source == "mds":
        return _mds(config, seed)
    file = None if config.source == "hub" else os.path.expanduser(str(config.train_file))
    try:
        if file is None:
            rows = load_dataset(config.hub_name, split=config.train_split, streaming=True)
        else:
            rows = load_dataset(_format_of(file), data_files=file, split="train", streaming=True)
    except DataError:
        raise
    except Exception as error:  # network, authentication, a missing split: each its own class
        where = f"data.hub_name {config.hub_name!r}, split {config.train_split!r}"
        if file is not None:
            where = f"data.train_file: {with_working_directory(file)}"
        raise DataError(f"{where} cannot be opened ({type(error).__name__}: {first_line(error)})") from error
    rows = rows.shuffle(seed=seed, buffer_size=config.shuffle_buffer)
    return EndlessReviews(split_dataset_by_node(rows, dist.get_global_rank(), dist.get_world_size()), file)


def _format_of(name: str) -> str:
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
        raise DataError(f"data.train_file: {shown} has no index.json; give a folder of MDS shards, or its address")
    return StreamingDataset(
        remote=remote,
        local=local,
        shuffle=True,
        shuffle_seed=seed,
        batch_size=config.batch_size // dist.get_world_size(),
    )
