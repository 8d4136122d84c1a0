"""python -m composer_speedups.predict RUN --input FILE [--output FILE | --evaluate] [key=value ...]; see ``--help``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.settings import Settings, fields_of, keys_help
from composer_speedups.data.paths import check_file, is_address
from composer_speedups.predict import choose_columns, exported_folder, read_task
from composer_speedups.train.cli import exit_codes

_USAGE = """\
usage: composer-speedups-predict RUN --input FILE [--output FILE | --evaluate [--errors FILE]] [key=value ...]

Predict with a finished run (a folder such as runs/quickstart, or its model/) for every row of a file: .csv, .tsv,
.jsonl, .parquet, .conll, or .txt with a text per line. Line i of the output is row i with its predictions, which are
null for a row without text. --evaluate prints the task's metrics for labelled rows instead, and --errors FILE writes
these rows with their losses, the worst first. Options may also be written as input=FILE.

keys:
"""
_FORMATS = (".jsonl", ".csv", ".parquet")
_COLUMNS = ("text_columns", "label_column", "label_columns")


class Request(Settings):
    input: str = ""
    """File of the texts, in the columns that the run was trained on."""
    output: str | None = None
    """File of the predictions: .jsonl, .csv or .parquet; null for NAME.predictions.jsonl beside an input NAME.csv."""
    evaluate: bool = False
    """Print the metrics of the task, as training computes them, and write no predictions."""
    errors: str | None = None
    """With evaluate: file of the labelled rows with loss and predictions, the largest loss first: .jsonl or .csv."""
    text_columns: list[str] | None = None
    """Columns of the texts, if they have other names than in training."""
    label_column: str | None = None
    """With evaluate: column of the label, if it has another name than in training."""
    label_columns: list[str] | None = None
    """With evaluate, task multilabel: columns of 0 and 1, in the order of training, if they have other names."""
    batch_size: int = Field(128, ge=1, le=65_536)
    """Rows per forward pass."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute; auto uses a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 on a GPU and fp32 on a CPU."""


def main(arguments: Sequence[str]) -> None:
    """Write predictions, and print where they are and how fast they were computed; or print metrics."""
    run, request = read_request(arguments)
    exported, evaluates = exported_folder(run), request.evaluate
    check_file(request.input, "input")
    from composer_speedups.data.reader import check_columns, columns_in, declared_classes, load_rows, no_rows

    declared = declared_classes(request.input, "input") if evaluates else None  # predictions keep the integers
    rows, source = load_rows([request.input], "input", None, declared), Path(request.input)
    task, max_length = read_task(exported, evaluates=evaluates)
    names, asked = columns_in(rows), {key: value for key in _COLUMNS if (value := getattr(request, key)) is not None}
    needed = choose_columns(task, names, asked, evaluates=evaluates)
    if not rows:
        raise no_rows(f"input: {source}")
    check_columns(names, needed, f"input: {source}")
    from composer_speedups.predict.model import FinishedModel  # imports torch, which a refusal does not need
    from composer_speedups.predict.rows import evaluate_file, predict_file

    model = FinishedModel.load(exported, device=request.device, precision=request.precision, task=(task, max_length))
    for line in model.engaged:
        print(line, file=sys.stderr)
    if evaluates:
        errors = None if request.errors is None else Path(request.errors)
        print(evaluate_file(model, rows, source, request.batch_size, errors))
    else:
        print(predict_file(model, rows, source, Path(str(request.output)), request.batch_size))


def read_request(arguments: Sequence[str]) -> tuple[Path, Request]:
    """Read the run's folder and the keys of a command line; ``--help`` prints every key and exits with 0."""
    pairs = _as_pairs(arguments)
    line = parse_command_line(pairs, "RUN", more="--input FILE", help=lambda: _USAGE + keys_help(Request))
    request, _ = read_settings(Request, line.overrides)
    if not request.input:
        raise ConfigError("input is missing; add --input FILE")
    if request.evaluate and request.output is not None:
        raise ConfigError("output has no effect with evaluate, which only prints; remove one of them")
    for key in ("errors", "label_column", "label_columns"):
        if getattr(request, key) is not None and not request.evaluate:
            raise ConfigError(f"{key} has no effect on predictions; add --evaluate, or remove it")
    for key in ("input", "output", "errors"):
        if file := getattr(request, key):
            setattr(request, key, os.path.expanduser(file))
    if not request.evaluate and request.output is None:
        request.output = f"{os.path.splitext(request.input)[0]}.predictions.jsonl"
    key, file = ("errors", request.errors) if request.evaluate else ("output", request.output)
    formats = _FORMATS[:2] if request.evaluate else _FORMATS
    if file is not None:
        if is_address(file):
            raise ConfigError(f"{key} must be a local file; add --{key} FILE")
        output = Path(file)
        if output.is_dir():
            raise ConfigError(f"{key}: {output} is a folder; name a file in it")
        if output.suffix not in formats:
            raise ConfigError(f"{key}: {output} must end in {', '.join(formats)}")
        if output.resolve() == Path(request.input).resolve():
            raise ConfigError(f"{key}: {output} is the input itself; choose another name")
    return Path(line.words[0]).expanduser(), request


def _as_pairs(arguments: Sequence[str]) -> list[str]:
    """``--input FILE`` as ``input=FILE``."""
    pairs, rest = [], iter(arguments)
    for argument in rest:
        name, equals, _ = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in fields_of(Request):
            pairs.append(argument)
        elif equals:
            pairs.append(argument.removeprefix("--"))
        else:
            pairs.append(f"{name}={'true' if name == 'evaluate' else next(rest, '')}")
    return pairs


def command() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # deletes the unfinished output
    with exit_codes("predict"):
        main(sys.argv[1:])


if __name__ == "__main__":
    command()
