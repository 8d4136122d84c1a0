"""Predict for the rows of a file block by block, or evaluate them."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from composer_speedups.callbacks.history import class_rows, note_on_metric
from composer_speedups.callbacks.throughput import shown_rate
from composer_speedups.core.errors import ConfigError, DataError, first_line
from composer_speedups.core.files import atomic_file, finite, make_folder
from composer_speedups.data.reader import Row, columns_in
from composer_speedups.data.sources import labelled_samples
from composer_speedups.data.summary import DataSummary, Problem, invalid_rows
from composer_speedups.predict.model import FinishedModel
from composer_speedups.tasks.metrics import loss_of
from composer_speedups.tasks.models import metrics_of

_ROWS_PER_BLOCK = 2048  # rows that are sorted by length and computed together


def predict_file(model: FinishedModel, rows: list[Row], source: Path, output: Path, batch_size: int) -> str:
    """Write the rows of ``source`` with their predictions, null for rows without text, to ``output``, atomically."""
    problems, where = dict[int, Problem](), f"input: {source}"
    for index, row in enumerate(rows):
        try:
            model.texts(row, f"row {index + 1}")
        except DataError as error:
            problems[index] = (error.who, error.fix)
    readable = [row for index, row in enumerate(rows) if index not in problems]
    if not readable:
        fix = "text_columns names the columns of the texts"
        raise invalid_rows(where, len(rows), [*problems.values()], fix)
    if problems:
        said = "predictions of such rows are null"
        print(invalid_rows(where, len(rows), [*problems.values()], said), file=sys.stderr)
    if output.suffix == ".parquet":  # refuse columns that it cannot hold before anything is computed
        _write(_joined(rows, [{}] * len(rows)), output.suffix, io.BytesIO())
    make_folder(output.parent, "output")  # before anything is computed
    began = time.perf_counter()
    predictions = predicted(model, readable, batch_size)
    rate = len(rows) / (time.perf_counter() - began)
    given, null = iter(predictions), _null(predictions[0])
    answers = [null if index in problems else next(given) for index in range(len(rows))]
    _save(_joined(rows, answers), output, "output")
    return f"{output}: {len(rows):,} rows, {shown_rate(rate)} rows/s"


def evaluate_file(model: FinishedModel, rows: list[Row], source: Path, batch_size: int, errors: Path | None) -> str:
    """The metrics of the task for the valid rows of ``source``, a line each; a line on stderr lists the others.
    ``errors`` is a file for the valid rows with loss and predictions, the largest loss first."""
    task = model.task
    if errors is not None and (task.name == "mlm" or loss_of(metrics_of(task, training=False)) is None):
        loss = f" with model.loss: {task.loss}" if hasattr(task, "loss") else ""
        raise ConfigError(f"errors: a run of {task.option}{loss} has no loss of a single row; remove it")
    where, summary = f"input: {source}", DataSummary()
    samples, places = labelled_samples(rows, where, task, summary)
    problems = [problem for dropped in summary.dropped for problem in dropped.problems]
    if problems:
        print(invalid_rows(where, len(rows), problems, "the metrics leave out such rows"), file=sys.stderr)
    if errors is not None:
        make_folder(errors.parent, "errors")  # before anything is computed
    metrics, by_class, losses = model.evaluate(samples, batch_size, by_row=errors is not None)
    if errors is not None:
        valid = [rows[place] for place in places]
        answers = zip(losses, predicted(model, valid, batch_size), strict=True)
        joined = zip(losses, _joined(valid, [{"loss": loss, **answer} for loss, answer in answers]), strict=True)
        worst = sorted(joined, key=lambda row: math.inf if math.isnan(row[0]) else -row[0])  # NaN: no word was read
        _save([row for _, row in worst], errors, "errors")
    left_out = f", {len(problems):,} of them left out" if problems else ""
    head = f"{source}: {len(rows):,} rows{left_out}"
    shown = [*((name, value, note_on_metric(name, by_class)) for name, value in metrics.items()), *class_rows(by_class)]
    width = max(15, *(len(name) for name, _, _ in shown))
    lines = [f"  {name:<{width}} {value:>10.6g}  {note}" for name, value, note in shown if value is not None]
    return "\n".join([head, *map(str.rstrip, lines)])


def predicted(model: FinishedModel, rows: Sequence[Row], batch_size: int) -> list[Row]:
    """The predictions for checked rows, computed in blocks; a thread tokenizes the next block meanwhile."""
    blocks = [rows[start : start + _ROWS_PER_BLOCK] for start in range(0, len(rows), _ROWS_PER_BLOCK)]
    computed = list[Row]()
    with ThreadPoolExecutor(1) as reader:
        encoded = [reader.submit(model.encode, block) for block in blocks[:1]]
        for number in range(1, len(blocks) + 1):
            encoded += [reader.submit(model.encode, block) for block in blocks[number : number + 1]]
            computed += model.predict(encoded.pop(0).result(), batch_size)
    return [model.task.with_text(prediction, model.texts(row)) for prediction, row in zip(computed, rows, strict=True)]


def _null(prediction: Any) -> Any:
    """The same fields with null values."""
    return {name: _null(value) for name, value in prediction.items()} if isinstance(prediction, dict) else None


def _joined(rows: Sequence[Row], predictions: Sequence[Row]) -> list[Row]:
    """All columns that any of the rows has, in each row, ``input_`` before names of predictions, then these."""
    names, predicted = columns_in(rows), predictions[0]
    renamed, taken = {name: name for name in names}, {*names, *predicted}
    for name in names:
        if name in predicted or name.partition(".")[0] in predicted:
            while renamed[name] in taken:
                renamed[name] = f"input_{renamed[name]}"
            taken.add(renamed[name])
    both = zip(rows, predictions, strict=True)
    return [{renamed[name]: row.get(name) for name in names} | prediction for row, prediction in both]


def _save(rows: list[Row], output: Path, key: str) -> None:
    try:
        with atomic_file(output.resolve()) as file:
            _write(rows, output.suffix, file)
    except OSError as error:
        raise ConfigError(
            f"{key}: {output} cannot be written ({error.strerror or error}); choose another file"
        ) from error


def _write(rows: list[Row], suffix: str, file: IO[bytes]) -> None:
    if suffix == ".jsonl":
        for row in rows:
            file.write(
                json.dumps(finite(row), default=str, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
            )
    elif suffix == ".csv":
        flat, text = [_flat(row) for row in rows], io.StringIO(newline="")
        writer = csv.DictWriter(text, [*flat[0]])
        writer.writeheader()
        writer.writerows(flat)
        file.write(text.getvalue().encode(errors="backslashreplace"))
    else:
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        except (pyarrow.ArrowException, OverflowError) as error:
            raise ConfigError(
                f"output: a .parquet file cannot hold these rows ({first_line(error)}); choose a .jsonl file"
            ) from error


def _flat(row: Row) -> Row:
    """A column for each class, such as ``probabilities.yes``; other lists and mappings are written as JSON."""
    flat: Row = {}
    for name, value in row.items():
        if name == "probabilities" and isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            nested = isinstance(value, (list, dict))
            flat[name] = json.dumps(value, default=str, ensure_ascii=False) if nested else value
    return flat
