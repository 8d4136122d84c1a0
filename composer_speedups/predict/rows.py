"""Predict for the rows of a file block by block, or evaluate them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from composer_speedups.callbacks.history import class_rows
from composer_speedups.core.errors import ConfigError, DataError, first_line
from composer_speedups.core.files import atomic_file, finite
from composer_speedups.data.reader import Row, check_columns
from composer_speedups.data.sources import labelled_samples
from composer_speedups.data.summary import DataSummary, invalid_rows
from composer_speedups.predict.model import FinishedModel

_ROWS_PER_BLOCK = 2048  # rows that are sorted by length and computed together


def predict_file(model: FinishedModel, rows: list[Row], source: Path, output: Path, batch_size: int) -> str:
    """Write every row of ``source``, which are ``rows``, with its predictions to ``output``, atomically: a call that is
    interrupted leaves the file as it was. If it is a symbolic link, the file that it leads to is written.

    A column of the input that has the name of a prediction is written as ``input_<name>``.

    All rows are checked before any is computed. The prediction of a row without text is null in each field; a line on
    stderr lists these rows.

    Returns:
        A line with the number of rows, the rate and the path.

    Raises:
        DataError: A missing column, or no row with text.
        ConfigError: ``output`` cannot be written, or a Parquet file cannot hold the columns of the input.
    """
    _check(model, rows, source, labelled=False)
    readable, problems = _with_stand_ins(model, rows, f"input: {source}")
    if problems:
        line = invalid_rows(f"input: {source}", len(rows), [*problems.values()], "predictions of such rows are null")
        print(line, file=sys.stderr)
    if output.suffix == ".parquet":
        _as_parquet(rows, io.BytesIO())  # refuse columns that it cannot hold before anything is computed
    try:
        with atomic_file(output.resolve()) as made:
            began = time.perf_counter()
            computed = itertools.chain.from_iterable(predicted(model, readable, batch_size))
            predictions = (_null(value) if i in problems else value for i, value in enumerate(computed))
            _write(rows, predictions, output.suffix, made)
            seconds = time.perf_counter() - began
    except OSError as error:
        raise ConfigError(
            f"output: {output} cannot be written ({error.strerror or error}); choose another output"
        ) from error
    return f"{output}: {len(rows):,} rows{f', {len(rows) / seconds:,.0f} rows/s' if rows else ''}"


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
    shown = [*((name, value, "") for name, value in metrics.items()), *class_rows(by_class)]
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


def _write(rows: Sequence[Row], predictions: Iterator[Row], suffix: str, file: IO[bytes]) -> None:
    """Write the rows with their predictions in the format of the suffix."""
    if suffix == ".jsonl":
        for row in _joined(rows, predictions):
            file.write(json.dumps(finite(row), default=str).encode() + b"\n")
    elif suffix == ".parquet":
        _as_parquet(list(_joined(rows, predictions, fill=True)), file)
    else:
        file.write(_as_csv(list(_joined(rows, map(_flat, predictions), fill=True))).encode())


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
