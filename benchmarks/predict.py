"""python -m benchmarks.predict RUN input=FILE [repeats=3] [batch_size=128] [rows=8000]

Times ``python -m composer_speedups.predict`` on a finished classifier and transformers' pipeline in turns, from texts
to probabilities. The pipeline uses 16 bits and SDPA on a GPU, with the texts in file order and sorted by length. The
first call of each, which compiles and warms up, is not counted. Prints rates, and appends a row to
benchmarks/results/<gpu>/predict.jsonl.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from benchmarks.rows import Row, append_row, call_time
from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.settings import key
from composer_speedups.data.sources import read_file
from composer_speedups.predict.model import FinishedModel
from composer_speedups.predict.rows import predicted
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.environment import environment


@dataclass
class Settings:
    input: str = ""
    """File with a column text."""
    repeats: int = key(3, ge=1)
    """Number of timed calls of each."""
    batch_size: int = key(128, ge=1)
    """Rows per forward pass, for each of them."""
    rows: int = key(8000, ge=1)
    """Number of rows of the file to use."""


def main(arguments: Sequence[str]) -> None:
    given = parse_command_line(arguments, "RUN")
    if given.help:
        print(__doc__)
        return
    settings, _ = read_settings(Settings, given.overrides)
    if not settings.input:
        raise ConfigError("command line: no texts; add input=FILE, a file with a column text")
    run = Path(given.words[0])
    texts = read_file(Path(settings.input), "input").column("text").to_pylist()[: settings.rows]
    model = FinishedModel.load(run)
    configurations = configurations_of(model, run, texts, settings.batch_size)
    seconds: dict[str, list[float]] = {name: [] for name in configurations}
    answers: dict[str, list[float]] = {}
    for repeat in range(settings.repeats + 1):
        for name, call in configurations.items():
            began = time.perf_counter()
            answers[name] = call()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    rates = {name: [len(texts) / each for each in values] for name, values in seconds.items()}
    first = answers["predict"]
    apart = {name: max(abs(a - b) for a, b in zip(first, each, strict=True)) for name, each in answers.items()}
    row: Row = {
        "table": "predict",
        "call": call_time(),
        "settings": dataclasses.asdict(settings),
        "precision": model.precision,
        "engaged": model.engaged,
        "samples_per_sec": rates,
        "largest_difference_of_probability": apart,
        "environment": environment(),
    }
    append_row(row, "predict")
    for name, values in rates.items():
        ratio = median(rates["predict"]) / median(values)
        print(
            f"{name}: {median(values):,.0f} samples/s (predict is {ratio:.2f} times that), differs by {apart[name]:.4f}"
        )


def configurations_of(
    model: FinishedModel, run: Path, texts: list[str], batch_size: int
) -> dict[str, Callable[[], list[float]]]:
    """Name → a call that gives the probability of the first label for each text."""
    on_gpu = model.model.device.type == "cuda"
    first = model.model.config.id2label[0]
    stock = AutoModelForSequenceClassification.from_pretrained(
        run / "model", attn_implementation="sdpa", dtype=torch.bfloat16 if on_gpu else torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    pipe: Any = pipeline("text-classification", model=stock, tokenizer=tokenizer, device=0 if on_gpu else -1)
    settings = {"batch_size": batch_size, "truncation": True, "max_length": model.max_length, "top_k": None}

    def piped(given: list[str]) -> list[float]:
        return [next(each["score"] for each in answer if each["label"] == first) for answer in pipe(given, **settings)]

    def sorted_first() -> list[float]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
        found = dict(zip(order, piped([texts[i] for i in order]), strict=True))
        return [found[i] for i in range(len(texts))]

    def predict() -> list[float]:
        os.environ.pop("TOKENIZERS_PARALLELISM", None)  # the pipeline sets it to false for the rest of the process
        rows = [{model.columns[0]: text} for text in texts]
        return [each["probabilities"][first] for block in predicted(model, rows, batch_size) for each in block]

    return {"predict": predict, "pipeline": lambda: piped(texts), "pipeline, sorted by length": sorted_first}


if __name__ == "__main__":
    with exit_codes("predict benchmark"):
        main(sys.argv[1:])
