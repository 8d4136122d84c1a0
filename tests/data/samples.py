"""Rows in files of each format, the config that names them, and the samples read in memory and as a stream."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from composer_speedups.data.sources import load_samples, load_validation
from composer_speedups.data.streams import stream_of_samples
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.labels import TaskWithClasses
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.tasks.task import Task

Rows = dict[str, list[Any]]
Reader = Callable[..., Rows]
ROWS: Rows = {"text": [f"Review {i}, and it is {'good' if i % 2 else 'bad'}." for i in range(20)], "label": [0, 1] * 10}


def save(rows: Rows, name: str) -> str:
    """Write columns to a file in the format of its suffix; return the name."""
    table, path = pyarrow.table(rows), Path(name)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    elif path.suffix == ".conll":
        sentences = (zip(*row.values(), strict=True) for row in table.to_pylist())
        blocks = ("\n".join(f"{word} NN O {tag}" for word, tag in sentence) for sentence in sentences)
        path.write_text("-DOCSTART- -X- -X- O\n\n" + "\n\n".join(blocks) + "\n")
    elif path.suffix == ".tsv":
        lines = ["\t".join(rows), *("\t".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
        path.write_text("".join(f"{line}\n" for line in lines))
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(rows), *zip(*rows.values(), strict=True)])
    return name


def files(train: str, evaluation: str | None = None, **kwargs: Any) -> DataConfig:
    settings = {"vocab_size": 200, "cache_dir": "cache", "max_length": 16, **kwargs}
    if not settings.get("streaming"):  # which cannot train a tokenizer
        settings.setdefault("tokenizer", "wordpiece")
    return DataConfig(source="files", train_file=train, eval_file=evaluation, **settings)


def in_memory(name: str, task: Task | None = None) -> Rows:
    """The samples that training reads from a file in memory, as columns."""
    return load_samples(files(name), task or Classification())[0][:]


def streamed(name: str, task: Task | None = None) -> Rows:
    """The same in the first pass over a stream in the order of the file; its classes are those of the file."""
    task = task or Classification()
    if isinstance(task, TaskWithClasses) and task.lacks_classes:
        load_validation(files("unused", name), task)
    stream, _ = stream_of_samples(files(name, streaming=True, shuffle_buffer=1), seed=1)
    examples = [task.example(row, "a streamed row", training=True) for row in stream.rows]
    return {column: [example[column] for example in examples] for column in examples[0]}


READERS = [in_memory, streamed]
