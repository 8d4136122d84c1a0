"""Stream training samples, so that a dataset may be larger than memory and disk."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node

from composer_speedups.core.errors import ConfigError, DataError, first_line
from composer_speedups.core.files import with_working_directory
from composer_speedups.data.flat import Ragged
from composer_speedups.data.paths import find_files, is_address
from composer_speedups.data.reader import (
    ClassNames,
    class_names,
    declared_classes,
    hub_dataset,
    iterate_rows,
    no_rows,
    saved_dataset,
    with_class_names,
)
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.tasks.task import Task, shown

_INSTALL = "pip install --no-deps mosaicml-streaming==0.13.0 && pip install Brotli catalogue python-snappy xxhash zstd"
_MAX_SHARDS = 64  # parts of a saved dataset, which ranks and workers share
_BLOCK = 64  # rows that are read from a file at a time


class EndlessSamples(torch.utils.data.IterableDataset[dict[str, Any]]):
    """A stream that starts over when it ends: ranks whose shares differ by a row would otherwise wait."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, empty = 0, False
        while not empty:  # with more workers than shards, some have no rows
            empty = True
            self.rows.set_epoch(epoch)
            for row in self.rows:
                empty = False
                yield row
            epoch += 1


class Tokenized:
    """Raw rows → checked samples → token ids → a batch from another collator; ``input_ids`` are used unchanged."""

    def __init__(self, collate: Any, tokenizer: Any, task: Task, max_length: int) -> None:
        self.collate, self.tokenizer, self.task, self.max_length = collate, tokenizer, task, max_length

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        columns: dict[str, list[Any]]
        if "input_ids" in rows[0]:
            vocabulary, label = len(self.tokenizer), self.task.label_column
            columns = {"input_ids": [_token_ids(row, vocabulary)[: self.max_length] for row in rows]}
            if label is not None:
                columns["labels"] = [self.task.label(row.get(label), "a streamed row") for row in rows]
        else:
            examples = [self.task.example(row, "a streamed row", training=True) for row in rows]
            texts = {key: [example[key] for example in examples] for key in examples[0]}
            columns = self.task.encode(texts, self.tokenizer, self.max_length)
        return self.collate(Ragged.of(columns))


def _token_ids(row: Mapping[str, Any], vocabulary: int) -> list[int]:
    """A row's ``input_ids`` without padding, checked here since a GPU's error names neither the id nor the row."""
    value, mask = row["input_ids"], row.get("attention_mask")
    ids = np.asarray(value)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        expected = "not a list of integers (in MDS shards: ndarray:int32)"
        raise DataError(f"a streamed row: input_ids is {shown(value)}, {expected}")
    ids = ids if mask is None else ids[np.asarray(mask) != 0]
    if not ids.size:
        raise DataError("a streamed row: input_ids has no token that its attention_mask keeps; leave the row out")
    unknown = ids[(ids < 0) | (ids >= vocabulary)]
    if unknown.size:
        raise DataError(
            f"a streamed row: input_ids has {unknown[0]}, and the tokenizer's ids are 0 to {vocabulary - 1:,}; set "
            "data.tokenizer to the one that made them"
        )
    return list(ids.tolist())


def stream_of_samples(config: DataConfig, seed: int) -> tuple[Any, ClassNames]:
    """This rank's share of the training rows, and the names of classes that the dataset declares for integers."""
    if config.source == "mds":
        return _mds(config, seed), {}
    rows, declared = _shuffled_rows(config, seed)
    return EndlessSamples(split_dataset_by_node(rows, dist.get_global_rank(), dist.get_world_size())), declared


def _shuffled_rows(config: DataConfig, seed: int) -> tuple[IterableDataset, ClassNames]:
    shuffle: dict[str, Any] = {"seed": seed, "buffer_size": config.shuffle_buffer}
    if config.source == "hub":
        rows, _ = hub_dataset(config, config.train_split, streaming=True)
        return _named(rows.shuffle(**shuffle), rows.features)
    name, key = str(config.train_file), "data.train_file"
    if os.path.isdir(os.path.expanduser(name)):
        saved = saved_dataset(name, key)
        rows = saved.to_iterable_dataset(num_shards=max(1, min(_MAX_SHARDS, len(saved))))
        return _named(rows.shuffle(**shuffle), saved.features)
    paths = find_files(name, key)
    declared = declared_classes(paths[0], key)
    if next(iterate_rows(paths, key), None) is None:  # without batches, the run would never end
        raise no_rows(f"{key}: {name}")
    # datasets divides the list of files among ranks and workers, and draws their order. It reads several files in turn,
    # with a thread for each, which takes longer than reading a row. Therefore a turn is a block of rows.
    blocks = IterableDataset.from_generator(_blocks, gen_kwargs={"paths": paths, "key": key, "declared": declared})
    rows = blocks.shuffle(seed=seed, buffer_size=1).map(_rows_of, batched=True, batch_size=1)
    return rows.shuffle(**shuffle, max_buffer_input_shards=1), declared


def _named(rows: IterableDataset, features: Mapping[str, Any] | None) -> tuple[IterableDataset, ClassNames]:
    declared = class_names(features or {})
    return rows.map(with_class_names, fn_kwargs={"declared": declared}), declared


def _blocks(paths: Iterable[str], key: str, declared: ClassNames) -> Iterator[dict[str, list[Any]]]:
    """Blocks of consecutive rows: column → its values."""
    rows = iterate_rows(paths, key, declared=declared)
    while block := list(itertools.islice(rows, _BLOCK)):
        names = {name: None for row in block for name in row} or {"": None}  # a row without columns is refused later
        yield {name: [row.get(name) for row in block] for name in names}


def _rows_of(blocks: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The rows of the only block."""
    return {name: values[0] for name, values in blocks.items()}


def _mds(config: DataConfig, seed: int) -> Any:
    if importlib.util.find_spec("streaming") is None:
        raise ConfigError(f"data.source: mds needs the package 'streaming'; {_INSTALL}")
    from streaming import StreamingDataset

    assert config.batch_size is not None
    name = str(config.train_file)
    remote = name if is_address(name) else None
    # the package reads whatever shards it finds in the local folder
    cache = Path(config.cache_dir) / "mds" / hashlib.sha256(name.encode()).hexdigest()[:16]
    local = str(cache if remote else Path(name).expanduser())
    if remote is None and not Path(local, "index.json").is_file():
        folder = with_working_directory(name)
        raise DataError(f"data.train_file: {folder} has no index.json; name a folder or address of MDS shards")
    try:
        return StreamingDataset(
            remote=remote,
            local=local,
            shuffle=True,
            shuffle_seed=seed,
            batch_size=config.batch_size // dist.get_world_size(),
        )
    except Exception as error:  # of the package and of cloud providers: different exception classes
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"data.train_file: {name} cannot be opened as MDS shards ({problem})") from error
