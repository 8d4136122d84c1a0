"""Predict for the rows of a file block by block, so that an interrupted call can be continued; or evaluate them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from composer_speedups.callbacks.class_report import class_rows, note_on_metric
from composer_speedups.core.errors import ConfigError, DataError, first_line
from composer_speedups.core.files import LockedFileError, atomic_file, finite, lock_file, remove_unfinished
from composer_speedups.data.reader import Row, check_columns
from composer_speedups.data.sources import labelled_samples
from composer_speedups.data.summary import DataSummary, invalid_rows
from composer_speedups.predict.model import FinishedModel

__all__ = ["evaluate_file", "predict_file", "predicted"]

_ROWS_PER_BLOCK = 2048  # rows that are sorted by length, computed and written together


def predict_file(model: FinishedModel, rows: list[Row], source: Path, output: Path, batch_size: int) -> str:
    """Write every row of ``source``, which are ``rows``, with its predictions to ``output``.

    A column of the input that has the name of a prediction is written as ``input_<name>``.

    All rows are checked before any is computed. The prediction of a row without text is null in each field; a line on
    stderr lists these rows. Predictions are collected in ``OUTPUT.partial`` until they are complete; a later call with
    the same run, input and columns continues after them. The file is locked meanwhile.

    Returns:
        A line with the number of rows, the rate and the path.

    Raises:
        DataError: A missing column, or no row with text.
        ConfigError: Another process writes to ``output``, the partial file belongs to another call, or a Parquet file
            cannot hold the columns of the input.
    """
    _check(model, rows, source, labelled=False)
    readable, problems = _with_stand_ins(model, rows, f"input: {source}")
    if problems:
        line = invalid_rows(f"input: {source}", len(rows), [*problems.values()], "predictions of such rows are null")
        print(line, file=sys.stderr)
    if output.suffix == ".parquet":
        _as_parquet(rows, io.BytesIO())  # refuse columns that it cannot hold before anything is computed
    began = time.perf_counter()
    partial = output.with_name(f"{output.name}.partial")
    with _Partial(partial, _identity(model, source)) as lines:
        done = lines.count
        if done:
            print(f"{partial} has {done:,} of {len(rows):,} rows; continuing after them", file=sys.stderr)
        for predictions in predicted(model, readable[done:], batch_size):
            numbered = enumerate(predictions, start=lines.count)
            lines.append([_null(value) if number in problems else value for number, value in numbered])
        seconds = time.perf_counter() - began
        _finish(partial, output, rows)
    rate = f", {(len(rows) - done) / seconds:,.0f} rows/s" if len(rows) > done else ""
    return f"{output}: {len(rows):,} rows{rate}"


def evaluate_file(model: FinishedModel, rows: list[Row], source: Path, batch_size: int) -> str:
    """Return the metrics of the task for the labelled rows of ``source``, which are ``rows``, a line each. Integers of
    classes for which the file declares names must be replaced by these.

    Rows without text, or whose label is missing or unknown, are left out; a line on stderr lists them.

    Raises:
        DataError: A missing column, or no valid row.
        ConfigError: A metric needs a package that is missing.
    """
    _check(model, rows, source, labelled=True)
    where, summary = f"input: {source}", DataSummary()
    samples = labelled_samples(rows, where, model.task, summary)
    problems = [problem for dropped in summary.dropped for problem in dropped.problems]
    if problems:
        print(invalid_rows(where, len(rows), problems, "the metrics leave out such rows"), file=sys.stderr)
    metrics, by_class = model.evaluate(samples, batch_size)
    left_out = f", {len(problems):,} of them left out" if problems else ""
    head = f"{source}: {len(rows):,} rows{left_out}"
    shown = [*((name, value, note_on_metric(name, by_class)) for name, value in metrics.items()), *class_rows(by_class)]
    width = max(15, *(len(name) for name, _, _ in shown))
    lines = [f"  {name:<{width}} {value:>10.6g}  {note}" for name, value, note in shown if value is not None]
    return "\n".join([head, *map(str.rstrip, lines)])


def predicted(model: FinishedModel, rows: Sequence[Row], batch_size: int) -> Iterator[list[Row]]:
    """Yield the predictions for checked rows in blocks; each block is tokenized while the previous one is computed."""
    blocks = [rows[start : start + _ROWS_PER_BLOCK] for start in range(0, len(rows), _ROWS_PER_BLOCK)]
    with ThreadPoolExecutor(1) as reader:
        encoded = deque(reader.submit(model.encode, block) for block in blocks[:1])
        for number in range(1, len(blocks) + 1):
            encoded.extend(reader.submit(model.encode, block) for block in blocks[number : number + 1])
            predictions = model.predict(encoded.popleft().result(), batch_size)
            block = zip(predictions, blocks[number - 1], strict=True)
            yield [model.task.with_text(prediction, model.texts(row)) for prediction, row in block]


def _check(model: FinishedModel, rows: list[Row], source: Path, *, labelled: bool) -> None:
    """Refuse rows without the columns that the model reads, or without those of the labels if ``labelled``."""
    names = _names(rows)
    model.choose_columns(names)
    needed = [(column, "text_columns") for column in model.columns]
    if labelled:
        needed = [(column, key.removeprefix("data.")) for column, key in model.task.columns(training=False)]
    if rows:
        check_columns(names, needed, f"input: {source}")


def _with_stand_ins(model: FinishedModel, rows: Sequence[Row], where: str) -> tuple[list[Row], dict[int, str]]:
    """The rows with the first valid one in the place of those without text, so that their predictions have the same
    fields; and index → problem of these."""
    problems, valid = dict[int, str](), None
    for index, row in enumerate(rows):
        try:
            model.texts(row, f"row {index + 1}")
            valid = valid or row
        except DataError as error:
            problems[index] = str(error)
    if valid is None:
        if rows:
            fix = "text_columns names the columns of the texts"
            raise DataError(invalid_rows(where, len(rows), [*problems.values()], fix))
        return [], {}
    return [valid if index in problems else row for index, row in enumerate(rows)], problems


def _null(prediction: Any) -> Any:
    """The same fields with null values."""
    return {name: _null(value) for name, value in prediction.items()} if isinstance(prediction, dict) else None


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns that any of the rows has, in the order in which they occur."""
    return list(dict.fromkeys(name for row in rows for name in row))


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


def _finish(partial: Path, output: Path, rows: Sequence[Row]) -> None:
    """Publish the rows with their predictions, which are complete, in the format of the suffix."""
    remove_unfinished(output.parent, output.name)
    with atomic_file(output) as made:
        if output.suffix == ".jsonl":
            for row in _joined(rows, _predictions(partial)):
                made.write(json.dumps(finite(row), default=str).encode() + b"\n")
        elif output.suffix == ".parquet":
            _as_parquet(list(_joined(rows, _predictions(partial), fill=True)), made)
        else:
            flat = (_flat(prediction) for prediction in _predictions(partial))
            made.write(_as_csv(list(_joined(rows, flat, fill=True))).encode())
    partial.unlink()


def _predictions(partial: Path) -> Iterator[Row]:
    with open(partial, encoding="utf-8") as lines:
        next(lines)
        yield from map(json.loads, lines)


def _joined(rows: Sequence[Row], predictions: Iterator[Row], *, fill: bool = False) -> Iterator[Row]:
    """The columns of each row, then its predictions.

    A column with the name of a prediction, or below it as in ``probabilities.yes``, gets ``input_`` before its name, as
    often as it takes for a name of its own. With ``fill``, each row has all columns that any row has, in the same
    order, with None for those that it lacks.
    """
    if not rows:
        return
    first = next(predictions)
    names = _names(rows)
    taken = {*names, *first}
    renamed = {}
    for name in names:
        if name in first or name.partition(".")[0] in first:
            new = f"input_{name}"
            while new in taken:
                new = f"input_{new}"
            taken.add(new)
            renamed[name] = new
    for row, prediction in zip(rows, itertools.chain([first], predictions), strict=True):
        yield {renamed.get(name, name): row.get(name) for name in (names if fill else row)} | prediction


def _as_parquet(rows: list[Row], file: IO[bytes]) -> None:
    names = _names(rows)
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        pyarrow.parquet.write_table(table, file)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise ConfigError(
            f"output: a .parquet file cannot hold these rows ({first_line(error)}); choose a .jsonl file"
        ) from error


def _flat(prediction: Row) -> Row:
    """One column per key of a mapping, such as ``probabilities.yes``."""
    return {
        f"{key}.{inner}" if inner else key: item
        for key, value in prediction.items()
        for inner, item in (value.items() if isinstance(value, dict) else [("", value)])
    }


def _as_csv(rows: list[Row]) -> str:
    """Lists and mappings are written as JSON."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _names(rows))
    writer.writeheader()
    for row in rows:
        plain = {k: json.dumps(v, default=str) if isinstance(v, (list, dict)) else v for k, v in row.items()}
        writer.writerow(plain)
    return text.getvalue()
