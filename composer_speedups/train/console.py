"""Console output of a run: five lines before training, then a progress bar, or lines in a log file."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, TextIO

from composer.core import DataSpec, State, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from tqdm import tqdm

from composer_speedups.tasks.metrics import reported_values
from composer_speedups.tasks.settings import SIZES

if TYPE_CHECKING:
    from composer_speedups.core.technique import Technique
    from composer_speedups.data.loader import Data
    from composer_speedups.tasks.models import FinetuneModel
    from composer_speedups.train.config.schema import Config

_REFRESH_SECONDS = 0.1  # between two updates
_RECENT_UPDATES = 50  # their rate determines the time left
_MIN_PROGRESS, _MIN_SECONDS = 0.1, 5.0  # between two lines of a log file
_NO_CHECKPOINTS = "at the end; checkpoint.interval is not set, so an interrupted run is lost"


def describe_run(
    config: Config, model: FinetuneModel, data: Data, techniques: list[Technique], folder: str, device: str
) -> str:
    """Five lines: model, data, techniques, batch, and the folder of the results; others if something is to be said of
    the data. ``--print-config`` prints every key.

    Args:
        config: The run's config.
        model: The model before it is sharded.
        data: The run's data.
        techniques: The requested techniques.
        folder: The run's folder.
        device: The device's name.
    """
    parameters = sum(p.numel() for p in model.parameters())
    asked = [t.name for t in techniques if t.engaged is not False]
    ranks = f" on {dist.get_world_size()} ranks" if dist.get_world_size() > 1 else ""
    truncated = "" if data.summary.truncation is None else f" ({data.summary.truncation})"
    rows = {
        "model": f"{_model_name(config)}, {_amount(parameters)} parameters, task {config.task.name}",
        "data": f"{_data_name(config)}, {_samples(data.train)} to train on, {_samples(data.eval)} to validate on, "
        f"{config.data.max_length} tokens at most{truncated}",
        **data.summary.lines(),
        "techniques": ", ".join(asked) or "none",
        "batch": f"{config.data.batch_size} samples{ranks}, {config.trainer.max_duration} in all, on {device}",
        "results": folder if config.checkpoint.interval else f"{folder} {_NO_CHECKPOINTS}",
    }
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def _model_name(config: Config) -> str:
    if (size := config.model.size) is not None:
        layers, hidden, _ = SIZES[size]
        return f"random BERT of size {size} ({layers} layers, hidden size {hidden})"
    random = " with random weights" if config.model.init == "random" else ""
    return f"{config.model.name}{random}"


def _data_name(config: Config) -> str:
    data = config.data
    names = {"hub": data.hub_name, "builtin": "built-in texts", "random": "random tokens"}
    return names.get(data.source) or str(data.train_file)


def _samples(spec: DataSpec | None) -> str:
    if spec is None:
        return "none"
    rows = getattr(spec.dataloader, "dataset", None)
    return f"{len(rows):,} samples" if isinstance(rows, Sized) else "a stream"


def _amount(count: float) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"


class TrainingProgress(LoggerDestination):
    """Shows a progress bar with epoch, samples/s, loss and time left on a terminal, and a line per tenth of the run
    elsewhere.

    Each evaluation prints a line with its metrics, named as in the report. Epochs count from 1. The time left is based
    on the last 50 updates, which are at least 0.1 s apart. Only rank 0 should have it. It replaces Composer's
    ProgressBarLogger, which prints the whole config, counts epochs from 0 and truncates metric names.

    Args:
        stream: Where to print; None for stderr.
        now: Returns the time in seconds; replaced in tests.
    """

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.stream, self._now = stream or sys.stderr, now
        self._bar: tqdm[Any] | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_UPDATES)  # (time, fraction of the run)
        self._printed = (-1.0, -1.0)  # fraction and time of the last printed line
        self._rate: float | None = None
        self._loss: float | None = None
        self._updated = -_REFRESH_SECONDS

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._rate = metrics.get("throughput/samples_per_sec", self._rate)
        self._loss = metrics.get("loss/train/total", self._loss)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._recent.append((self._now(), _fraction(state)))
        if self.stream.isatty():
            self._bar = tqdm(
                total=1.0,
                initial=_fraction(state),
                bar_format="training {percentage:3.0f}%|{bar:20}| {desc}",  # a {postfix} would begin with a comma
                file=self.stream,
                dynamic_ncols=True,
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        now = self._now()
        if now - self._updated >= _REFRESH_SECONDS:
            self._updated = now
            self._update(state, now)

    def _update(self, state: State, now: float) -> None:
        fraction = _fraction(state)
        self._recent.append((now, fraction))
        if self._bar is not None:
            self._bar.set_description_str(self._status(state), refresh=False)
            self._bar.update(fraction - self._bar.n)
            return
        before, then = self._printed
        if fraction - before >= _MIN_PROGRESS and now - then >= _MIN_SECONDS:
            self._printed = fraction, now
            self._print(f"training {fraction:4.0%}  {self._status(state)}")

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self._bar is not None:
            length = "" if state.dataloader_len is None else f"/{int(state.dataloader_len)}"
            self._bar.set_description_str(f"evaluating, batch {state.eval_timestamp.batch.value}{length}")

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self._status(state))
        if metrics := reported_values(state.eval_metric_values):
            values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
            self._print(f"{_position(state, over=True)}: {values}")

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._bar is not None:
            self._update(state, self._now())
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
        parts = [_position(state)]
        if self._rate is not None:
            parts.append(f"{self._rate:,.0f} samples/s")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        (started, first), (now, last) = self._recent[0], self._recent[-1]
        if last > first:
            parts.append(f"{tqdm.format_interval((1 - last) * (now - started) / (last - first))} left")
        return ", ".join(parts)


def _fraction(state: State) -> float:
    """The trained fraction of the run, 0 to 1, including the current epoch if its length is known."""
    assert state.max_duration is not None
    done = float(state.timestamp.get(state.max_duration.unit).value)
    if state.max_duration.unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        done += state.timestamp.batch_in_epoch.value / max(1, int(state.dataloader_len))
    return min(1.0, done / max(1, state.max_duration.value))


def _position(state: State, *, over: bool = False) -> str:
    """Format ``epoch 1/2, batch 340``; ``over`` selects the epoch that has just ended instead of the next one."""
    batch = f"batch {state.timestamp.batch.value:,}"
    if state.max_duration is None or state.max_duration.unit != TimeUnit.EPOCH:
        return batch
    total = state.max_duration.value
    ended = over and state.timestamp.batch_in_epoch.value == 0
    return f"epoch {min(total, state.timestamp.epoch.value + (not ended))}/{total}, {batch}"
