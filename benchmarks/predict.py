"""python -m benchmarks.predict RUN input=FILE [repeats=3] [batch_size=128] [rows=8000]

Compare ``python -m composer_speedups.predict`` with transformers' pipeline, from texts to probabilities.

RUN is the folder of a finished classifier, and FILE has a column ``text``. Three configurations take turns: predict,
the pipeline with the texts in the order of the file, and the pipeline with the texts sorted by length. On a GPU, the
pipeline uses bf16 and SDPA. The first call of each configuration compiles and warms up, and is not timed. Prints the
samples per second, and appends a row to ``results/<gpu>/predict.jsonl`` (``cpu`` without a GPU).
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
from composer_speedups.data.reader import check_file, load_rows
from composer_speedups.predict.model import FinishedModel
from composer_speedups.predict.rows import predicted
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.environment import environment


@dataclass
class Settings:
    input: str = ""
    """File with a column `text`."""
    repeats: int = key(3, ge=1)
    """Timed calls of each configuration."""
    batch_size: int = key(128, ge=1)
    """Texts per forward pass, in every configuration."""
    rows: int = key(8000, ge=1)
    """The first n rows of the file are used."""


def main(arguments: Sequence[str]) -> None:
    """Time the configurations, print their rates and append a row.

    Raises:
        ConfigError: An argument cannot be read, or ``RUN`` or ``input`` is missing.
        DataError: The file has no column ``text``.
    """
    command = parse_command_line(arguments, "RUN")
    if command.help:
        print(__doc__)
        return
    settings, _ = read_settings(Settings, command.overrides)
    if not settings.input:
        raise ConfigError("command line: input is missing; add input=FILE, a file with a column 'text'")
    run = Path(command.words[0])
    check_file(settings.input, "input")
    rows = load_rows([settings.input], "input", [("text", "input to another file")])
    texts = [row["text"] for row in rows[: settings.rows]]
    model = FinishedModel.load(run)
    configurations = configurations_of(model, run, texts, settings.batch_size)
    seconds: dict[str, list[float]] = {name: [] for name in configurations}
    probabilities: dict[str, list[float]] = {}
    for repeat in range(settings.repeats + 1):
        for name, call in configurations.items():
            began = time.perf_counter()
            probabilities[name] = call()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    rates = {name: [len(texts) / duration for duration in durations] for name, durations in seconds.items()}
    differences = {
        name: max(abs(a - b) for a, b in zip(probabilities["predict"], others, strict=True))
        for name, others in probabilities.items()
    }
    row: Row = {
        "table": "predict",
        "call": call_time(),
        "settings": dataclasses.asdict(settings),
        "precision": model.precision,
        "engaged": model.engaged,
        "samples_per_sec": rates,
        "largest_difference_of_probability": differences,
        "environment": environment(),
    }
    append_row(row, "predict")
    for name, values in rates.items():
        ratio = median(rates["predict"]) / median(values)
        print(
            f"{name}: {median(values):,.0f} samples/s; predict is {ratio:.2f} times as fast; probabilities differ by "
            f"up to {differences[name]:.4f}"
        )


def configurations_of(
    model: FinishedModel, run: Path, texts: list[str], batch_size: int
) -> dict[str, Callable[[], list[float]]]:
    """Return, by name, functions that compute the probability of the first label for each text."""
    on_gpu = model.model.device.type == "cuda"
    first_label = model.model.config.id2label[0]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    stock = AutoModelForSequenceClassification.from_pretrained(
        run / "model", attn_implementation="sdpa", dtype=dtype, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(run / "model", trust_remote_code=False)
    pipe: Any = pipeline("text-classification", model=stock, tokenizer=tokenizer, device=0 if on_gpu else -1)
    settings = {"batch_size": batch_size, "truncation": True, "max_length": model.max_length, "top_k": None}

    def pipeline_scores(inputs: list[str]) -> list[float]:
        results = pipe(inputs, **settings)  # for each text, the score of every label
        return [next(each["score"] for each in scores if each["label"] == first_label) for scores in results]

    def sorted_by_length() -> list[float]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
        scores = dict(zip(order, pipeline_scores([texts[i] for i in order]), strict=True))
        return [scores[i] for i in range(len(texts))]

    def predict() -> list[float]:
        os.environ.pop("TOKENIZERS_PARALLELISM", None)  # the pipeline sets it to false for the rest of the process
        rows = [{model.columns[0]: text} for text in texts]
        return [each["probabilities"][first_label] for block in predicted(model, rows, batch_size) for each in block]

    return {
        "predict": predict,
        "pipeline": lambda: pipeline_scores(texts),
        "pipeline, sorted by length": sorted_by_length,
    }


if __name__ == "__main__":
    with exit_codes("predict benchmark"):
        main(sys.argv[1:])
