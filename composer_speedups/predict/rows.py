"""Predict for the rows of a file block by block, so that an interrupted call can be continued."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import publish, write_atomically
from composer_speedups.data.sources import check_columns, read_file
from composer_speedups.predict.model import FinishedModel

__all__ = ["predict_file", "predicted"]

_BLOCK = 2048  # rows that are sorted by length, computed and written together


def predict_file(model: FinishedModel, source: Path, output: Path, batch_size: int) -> str:
    """Write the predictions for every row of ``source`` to ``output``.

    All rows are checked before any is computed. Predictions are collected in ``OUTPUT.partial`` until they are
    complete; a later call with the same run, input and columns continues after them.

    Returns:
        A line with the number of rows, the rate and the path.

    Raises:
        DataError: A file that cannot be read, a missing column, or a row without text, which is named.
    """
    rows = _checked_rows(model, source)
    began = time.perf_counter()
    partial = output.with_name(f"{output.name}.partial")
    with _Partial(partial, _identity(model, source)) as lines:
        done = lines.count
        if done:
            print(f"{partial} has {done:,} of {len(rows):,} rows; continuing after them", file=sys.stderr)
        for predictions in predicted(model, rows[done:], batch_size):
            lines.append(predictions)
    seconds = time.perf_counter() - began
    _finish(partial, output)
    rate = f", {(len(rows) - done) / seconds:,.0f} rows/s" if len(rows) > done else ""
    return f"{output}: {len(rows):,} rows{rate}"


def predicted(model: FinishedModel, rows: Sequence[dict[str, Any]], batch_size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the predictions for checked rows in blocks; each block is tokenized while the previous one is computed."""
    blocks = [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    with ThreadPoolExecutor(1) as reader:
        encoded = deque(reader.submit(model.encode, block) for block in blocks[:1])
        for number in range(1, len(blocks) + 1):
            encoded.extend(reader.submit(model.encode, block) for block in blocks[number : number + 1])
            yield model.predict(encoded.popleft().result(), batch_size)


def _checked_rows(model: FinishedModel, source: Path) -> list[dict[str, Any]]:
    table = read_file(source, "input")
    check_columns(table, [(column, "text_columns") for column in model.columns], f"input: {source}")
    rows = table.select(model.columns).to_pylist()
    for number, row in enumerate(rows, start=1):
        for column in model.columns:
            model.task.text(row, column, f"input: {source}, row {number}")
    return rows


def _identity(model: FinishedModel, source: Path) -> dict[str, Any]:
    """What a partial file must have been started with, so that a call may continue it."""
    found = os.stat(source)
    return {
        "model": str(Path(model.model.name_or_path).resolve()),
        "model_time": os.stat(Path(model.model.name_or_path) / "config.json").st_mtime_ns,
        "input": str(source.resolve()),
        "input_size": found.st_size,
        "input_time": found.st_mtime_ns,
        "columns": model.columns,
        "precision": model.precision,
    }


class _Partial:
    """The predictions so far: a JSON line that identifies the run, input and columns, then one line per row."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.count = 0
        head = json.dumps(identity).encode() + b"\n"
        if path.exists():
            with open(path, "rb") as file:
                if file.readline() != head:
                    raise ConfigError(
                        f"output: {path} belongs to another run, input or columns; delete it, or choose another output"
                    )
                whole = file.tell()
                for line in file:
                    if not line.endswith(b"\n"):  # the process was killed while writing
                        break
                    self.count, whole = self.count + 1, whole + len(line)
            os.truncate(path, whole)
        else:
            write_atomically(path, head)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, predictions: list[dict[str, Any]]) -> None:
        self._file.write("".join(json.dumps(each) + "\n" for each in predictions).encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def _finish(partial: Path, output: Path) -> None:
    """Publish the complete predictions in the format of the suffix."""
    made = output.with_name(f"{output.name}.unfinished")
    if output.suffix == ".jsonl":
        with open(partial, "rb") as source, open(made, "wb") as target:
            source.readline()
            while chunk := source.read(2**20):
                target.write(chunk)
    elif output.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(_rows(partial))), made)
    else:
        made.write_text(_as_csv(list(_rows(partial))))
    publish(made, output)
    partial.unlink()


def _rows(partial: Path) -> Iterator[dict[str, Any]]:
    with open(partial, encoding="utf-8") as lines:
        next(lines)
        yield from map(json.loads, lines)


def _as_csv(rows: list[dict[str, Any]]) -> str:
    """A CSV column per key; mappings have one column per key, and lists are JSON."""
    flat = [
        {
            f"{key}.{inner}" if inner else key: json.dumps(item) if isinstance(item, list) else item
            for key, value in row.items()
            for inner, item in (value.items() if isinstance(value, dict) else [("", value)])
        }
        for row in rows
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(flat[0]) if flat else [])
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
