"""Predict for the rows of a file block by block, so that an interrupted call can be continued."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.core.files import LockedFileError, atomic_file, lock_file, remove_unfinished
from composer_speedups.data.paths import check_file
from composer_speedups.data.reader import load_rows
from composer_speedups.data.summary import invalid_rows
from composer_speedups.predict.model import FinishedModel

__all__ = ["predict_file", "predicted"]

_ROWS_PER_BLOCK = 2048  # rows that are sorted by length, computed and written together


def predict_file(model: FinishedModel, source: Path, output: Path, batch_size: int) -> str:
    """Write the predictions for every row of ``source`` to ``output``.

    All rows are checked before any is computed. The prediction of a row without text is null in each field; a line on
    stderr lists these rows. Predictions are collected in ``OUTPUT.partial`` until they are complete; a later call with
    the same run, input and columns continues after them. The file is locked meanwhile.

    Returns:
        A line with the number of rows, the rate and the path.

    Raises:
        DataError: A file that cannot be read, a missing column, or no row with text.
        ConfigError: Another process writes to ``output``, or the partial file belongs to another call.
    """
    rows, invalid = _checked_rows(model, source)
    if invalid:
        print(_invalid(source, rows, invalid, "predictions of such rows are null"), file=sys.stderr)
    began = time.perf_counter()
    partial = output.with_name(f"{output.name}.partial")
    with _Partial(partial, _identity(model, source)) as lines:
        done = lines.count
        if done:
            print(f"{partial} has {done:,} of {len(rows):,} rows; continuing after them", file=sys.stderr)
        for predictions in predicted(model, rows[done:], batch_size):
            numbered = enumerate(predictions, start=lines.count)
            lines.append([_null(value) if number in invalid else value for number, value in numbered])
        seconds = time.perf_counter() - began
        _finish(partial, output)
    rate = f", {(len(rows) - done) / seconds:,.0f} rows/s" if len(rows) > done else ""
    return f"{output}: {len(rows):,} rows{rate}"


def predicted(model: FinishedModel, rows: Sequence[dict[str, Any]], batch_size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the predictions for checked rows in blocks; each block is tokenized while the previous one is computed."""
    blocks = [rows[start : start + _ROWS_PER_BLOCK] for start in range(0, len(rows), _ROWS_PER_BLOCK)]
    with ThreadPoolExecutor(1) as reader:
        encoded = deque(reader.submit(model.encode, block) for block in blocks[:1])
        for number in range(1, len(blocks) + 1):
            encoded.extend(reader.submit(model.encode, block) for block in blocks[number : number + 1])
            yield model.predict(encoded.popleft().result(), batch_size)


def _checked_rows(model: FinishedModel, source: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The rows of a file, and index → problem of those without text. They are replaced with the first valid row, so
    that their predictions have the same fields."""
    check_file(str(source), "input")
    rows = load_rows([str(source)], "input", [(column, "text_columns") for column in model.columns])
    invalid, valid = dict[int, str](), None
    for index, row in enumerate(rows):
        try:
            for column in model.columns:
                model.task.text(row, column, f"row {index + 1}")
            valid = valid or row
        except DataError as error:
            invalid[index] = str(error)
    if rows and valid is None:
        raise DataError(_invalid(source, rows, invalid, "text_columns names the columns of the texts"))
    return [valid if index in invalid else row for index, row in enumerate(rows)], invalid  # type: ignore[misc]


def _invalid(source: Path, rows: list[dict[str, Any]], invalid: dict[int, str], fix: str) -> str:
    return invalid_rows(f"input: {source}", len(rows), [*invalid.values()], fix)


def _null(prediction: Any) -> Any:
    """The same fields with null values."""
    return {name: _null(value) for name, value in prediction.items()} if isinstance(prediction, dict) else None


def _identity(model: FinishedModel, source: Path) -> dict[str, Any]:
    """What a partial file must have been started with, so that a call may continue it."""
    status = os.stat(source)
    return {
        "model": str(Path(model.model.name_or_path).resolve()),
        "model_time": os.stat(Path(model.model.name_or_path) / "config.json").st_mtime_ns,
        "input": str(source.resolve()),
        "input_size": status.st_size,
        "input_time": status.st_mtime_ns,
        "columns": model.columns,
        "precision": model.precision,
    }


class _Partial:
    """The predictions so far: a JSON line that identifies the run, input and columns, then one line per row.

    The file is locked until the block ends.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.count = 0
        try:
            self._file = lock_file(path, "output")
        except LockedFileError as error:
            raise ConfigError(f"{error}; wait until it ends, or choose another output") from error
        except OSError as error:
            raise ConfigError(f"output: {path} cannot be written ({error.strerror}); choose another output") from error
        try:
            self._continue(path, json.dumps(identity).encode() + b"\n")
        except BaseException:
            self._file.close()
            raise

    def _continue(self, path: Path, head: bytes) -> None:
        """Count the complete lines, and cut off what a killed process did not complete."""
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            first = lines.readline()
            # a process killed at once has written none of the head, or part of it
            if first != head and (first.endswith(b"\n") or not head.startswith(first)):
                raise ConfigError(
                    f"output: {path} belongs to another run, input or columns; delete it, or choose another output"
                )
            whole = len(first) if first == head else 0
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self.count, whole = self.count + 1, whole + len(line)
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._write(head)

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, predictions: list[dict[str, Any]]) -> None:
        self.count += len(predictions)
        self._write("".join(json.dumps(prediction) + "\n" for prediction in predictions).encode())

    def _write(self, data: bytes) -> None:
        with open(self._file.fileno(), "wb", closefd=False) as file:
            file.write(data)
        os.fsync(self._file.fileno())


def _finish(partial: Path, output: Path) -> None:
    """Publish the complete predictions in the format of the suffix."""
    remove_unfinished(output.parent, output.name)
    with atomic_file(output) as made:
        if output.suffix == ".jsonl":
            with open(partial, "rb") as source:
                source.readline()
                shutil.copyfileobj(source, made, 2**20)
        elif output.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(_rows(partial))), made)
        else:
            made.write(_as_csv(list(_rows(partial))).encode())
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
