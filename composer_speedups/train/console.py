"""Console output of a run: six lines before training, then a progress bar, or lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sized
from typing import Any, TextIO

from composer.core import DataSpec, State, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from tqdm import tqdm

from composer_speedups.callbacks.throughput import shown_rate, trained_fraction
from composer_speedups.core.technique import Technique
from composer_speedups.data.loader import Data
from composer_speedups.tasks.metrics import reported_values
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.tasks.settings import SIZES
from composer_speedups.train.config.schema import Config

_MIN_PROGRESS, _MIN_SECONDS = 0.1, 5.0  # between two lines of a log file
_BAR_SECONDS = 0.1  # between two updates of the bar
_NO_CHECKPOINTS = "at the end; checkpoint.interval is not set, so an interrupted run is lost"


def describe_run(
    config: Config, model: FinetuneModel, data: Data, techniques: list[Technique], folder: str, device: str
) -> str:
    """Up to seven lines: model, data, dropped rows, check of the data, techniques, batch, and folder of the results."""
    parameters = sum(p.numel() for p in model.parameters())
    asked = [t.name for t in techniques if t.engaged is not False]
    ranks = f" on {dist.get_world_size()} ranks" if dist.get_world_size() > 1 else ""
    truncated = "" if data.summary.truncation is None else f" ({data.summary.truncation})"
    name = f"{config.model.name}{' with random weights' * (config.model.init == 'random')}"
    if (size := config.model.size) is not None:
        layers, hidden, _ = SIZES[size]
        name = f"random BERT of size {size} ({layers} layers, hidden size {hidden})"
    tokens = config.data.batch_tokens
    batch = f"{config.data.batch_size} samples" if tokens is None else f"{tokens:,} tokens"
    source = {"hub": config.data.hub_name, "builtin": "built-in texts", "random": "random tokens"}
    rows = {
        "model": f"{name}, {parameters / 1e6:,.1f} M parameters, task {config.task.name}",
        "data": f"{source.get(config.data.source, config.data.train_file)}, {_samples(data.train)} to train on, "
        f"{_samples(data.eval)} to validate on, {config.data.max_length} tokens at most{truncated}",
        **data.summary.lines(),
        "techniques": ", ".join(asked) or "none",
        "batch": f"{batch}{ranks}, {config.trainer.max_duration} in all, on {device}",
        "results": folder if config.checkpoint.interval else f"{folder} {_NO_CHECKPOINTS}",
    }
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def _samples(spec: DataSpec | None) -> str:
    if spec is None:
        return "none"
    rows = getattr(spec.dataloader, "dataset", None)
    return f"{len(rows):,} samples" if isinstance(rows, Sized) else "a stream"


class TrainingProgress(LoggerDestination):
    """Shows a progress bar on a terminal, and a line per tenth of the run elsewhere. Composer's cuts names."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self._bar: tqdm[Any] | None = None
        self._start = self._shown = (0.0, 0.0)  # time and fraction of the run, at its start and when last shown
        self._rate: float | None = None
        self._peak: float | None = None
        self._loss: float | None = None

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._rate = metrics.get("throughput/samples_per_sec", self._rate)
        self._loss = metrics.get("loss/train/total", self._loss)
        self._peak = metrics.get("memory/peak_gib", self._peak)
        if (seconds := metrics.get("throughput/planned_seconds")) is not None:
            self._print(f"training takes {about(seconds, self._peak)}, evaluations not included")

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if (size := hyperparameters.get("layer_freezing/cache")) is not None:
            self._print(f"the frozen blocks' outputs take {size}, and are computed first")

    def fit_start(self, state: State, logger: Logger) -> None:
        self._start, self._shown = (time.monotonic(), trained_fraction(state)), (0.0, -1.0)
        if self.stream.isatty():
            self._bar = tqdm(
                total=1.0,
                initial=trained_fraction(state),
                bar_format="training {percentage:3.0f}%|{bar:20}| {desc}, {remaining} left",
                file=self.stream,
                dynamic_ncols=True,
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        now, (then, before) = time.monotonic(), self._shown
        if now - then < (_MIN_SECONDS if self._bar is None else _BAR_SECONDS):
            return
        (started, first), fraction = self._start, trained_fraction(state)
        if self._bar is not None:
            self._shown = now, fraction
            self._update(state)
        elif fraction - before >= _MIN_PROGRESS:
            self._shown = now, fraction
            left = tqdm.format_interval((1 - fraction) * (now - started) / (fraction - first))
            self._print(f"training {fraction:4.0%}  {self._status(state)}, {left} left")

    def _update(self, state: State) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self._status(state), refresh=False)
            self._bar.update(trained_fraction(state) - self._bar.n)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self._bar is not None:
            self._bar.set_description_str(f"evaluating, batch {state.eval_timestamp.batch.value}")

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self._update(state)
        if metrics := reported_values(state.eval_metric_values):
            values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
            self._print(f"{_position(state, over=True)}: {values}")

    def fit_end(self, state: State, logger: Logger) -> None:
        self._update(state)
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)

    def _status(self, state: State) -> str:
        rate = "" if self._rate is None else f", {shown_rate(self._rate)} samples/s"
        loss = "" if self._loss is None else f", loss {self._loss:.4f}"
        return f"{_position(state)}{rate}{loss}"


def about(seconds: float, gib: float | None) -> str:
    """``about 12 minutes and 3.4 GiB``, which is the peak so far; seconds below two minutes, and a tenth below ten."""
    time = f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{seconds:.{int(seconds < 10)}f} seconds"
    return f"about {time}" if gib is None else f"about {time} and {gib:.1f} GiB"


def _position(state: State, *, over: bool = False) -> str:
    """Format ``epoch 1/2, batch 340``; ``over`` selects the epoch that has just ended instead of the next one."""
    batch = f"batch {state.timestamp.batch.value:,}"
    if state.max_duration is None or state.max_duration.unit != TimeUnit.EPOCH:
        return batch
    total = state.max_duration.value
    ended = over and state.timestamp.batch_in_epoch.value == 0
    return f"epoch {min(total, state.timestamp.epoch.value + (not ended))}/{total}, {batch}"
