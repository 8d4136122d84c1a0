"""Record a run's evaluations for report.json, by batch: their metrics, also across resumes, and counts by class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from composer.core import State
from composer.loggers import Logger

from composer_speedups.callbacks.checkpoints import SavedCallback
from composer_speedups.callbacks.evaluations import is_evaluation_of
from composer_speedups.core.processes import process_age
from composer_speedups.tasks.metrics import ByClass, final_metrics, reported_values

_MOST_ROWS = 10
_WIDEST = 48  # characters of a printed class with the words before it


class RunHistory(SavedCallback):
    """Records evaluations, and preserves values of report.json across resumes.

    A run that was interrupted after its last batch repeats the last evaluation when resumed, and trains nothing.
    ``inputs`` is what the run reads, by content; see :func:`.inputs_of`.
    """

    saved = ("evaluations", "seconds", "wall_seconds", "resumed", "metrics")

    def __init__(self, inputs: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.inputs = inputs or {}
        super().__init__()

    def reset(self) -> None:
        self.evaluations: dict[int, dict[str, float]] = {}  # batch → metrics, named as in reports (``accuracy``)
        self.seconds: dict[int, float] = {}  # batch → seconds from the start of the run until that evaluation was over
        self.wall_seconds = 0.0  # of earlier processes, each up to the checkpoint that was resumed from
        self.resumed: list[dict[str, Any]] = []  # the batch and checkpoint of each resume
        self.metrics: dict[str, float] = {}  # at the checkpoint; values that this process measures replace them
        self._over = False
        self._state: State | None = None

    def init(self, state: State, logger: Logger) -> None:
        super().init(state, logger)
        self._state = state

    def after_load(self, state: State, logger: Logger) -> None:
        if state.load_path is not None and state.timestamp.batch.value > 0:
            name = Path(state.load_path).name
            self.resumed.append({"batch": state.timestamp.batch.value, "checkpoint": name})
            self._over = state.max_duration is not None and state.timestamp >= state.max_duration

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._over:
            state.stop_training()  # before the first batch, whatever duration fit() was called with
            state.previous_timestamp = state.timestamp  # repeats the last evaluation, which may follow all checkpoints

    def eval_after_all(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        self.evaluations[batch] = reported_values(state.eval_metric_values)
        self.seconds[batch] = self.wall_seconds + process_age()

    def summary(self) -> list[dict[str, float]]:
        """The ``evaluations`` of report.json: batch, seconds and metrics of each."""
        return [{"batch": b, "seconds": self.seconds[b], **values} for b, values in self.evaluations.items()]

    def state_dict(self) -> dict[str, Any]:
        assert self._state is not None
        return {
            **super().state_dict(),
            "wall_seconds": self.wall_seconds + process_age(),
            "metrics": {**self.metrics, **final_metrics(self._state)},
            "inputs": self.inputs,
        }


class ClassReport(SavedCallback):
    """Keeps how often each class was true and predicted in each evaluation of the Trainer's own evaluator ``eval``."""

    saved = ()

    def reset(self) -> None:
        self.names: list[str] = []  # of the K classes
        self.counts: dict[int, npt.NDArray[np.int64]] = {}  # batch → number of true, predicted and correct ones (3, K)
        self.confusions: dict[int, npt.NDArray[np.int64] | None] = {}  # batch → samples by true and predicted class

    def eval_end(self, state: State, logger: Logger) -> None:
        if not is_evaluation_of(state, "eval"):
            return
        for metric in state.eval_metrics["eval"].values():
            if isinstance(metric, ByClass) and metric.update_called:
                metric.compute()  # computed and cached by Composer
                assert metric.seen is not None
                batch, confusion = state.timestamp.batch.value, metric.confusion
                self.names = list(metric.names)
                self.counts[batch] = metric.seen.cpu().numpy()
                self.confusions[batch] = None if confusion is None else confusion.cpu().numpy()

    def summary(self, batch: int | None = None) -> dict[str, Any]:
        """The section ``classes`` of report.json, for the evaluation after ``batch`` or the last one; empty if there
        was none. ``confusion`` is None with several labels per sample, or more than 100 classes."""
        batch = batch if batch is not None else max(self.counts, default=-1)
        if batch not in self.counts:
            return {}
        confusion = self.confusions[batch]
        return {
            "batch": batch,
            "classes": metrics_by_class(self.names, self.counts[batch]),
            "confusion": None if confusion is None else confusion.tolist(),
        }


def metrics_by_class(names: Sequence[str], counts: npt.NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """Name → ``precision``, ``recall``, ``f1`` (None where undefined), ``samples`` and ``predicted``, from the counts
    of true, predicted and correct ones (3, K)."""
    return {
        name: {
            "precision": _ratio(hits, predicted),
            "recall": _ratio(hits, true),
            "f1": _ratio(2 * hits, true + predicted),
            "samples": true,
            "predicted": predicted,
        }
        for name, (true, predicted, hits) in zip(names, counts.T.tolist(), strict=True)
    }


def class_rows(classes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float | None, str]]:
    """``F1 of spam``, 0.812, ``precision 0.9, recall 0.74, 31 samples`` for each of up to ten classes."""
    for name, values in classes.items() if len(classes) <= _MOST_ROWS else ():
        shown = [f"{key} {values[key]:.4g}" for key in ("precision", "recall") if values[key] is not None]
        label = " ".join(f"F1 of {name}".split())
        yield (
            label if len(label) <= _WIDEST else f"{label[: _WIDEST - 1]}…",
            values["f1"],
            ", ".join([*shown, f"{values['samples']:,} samples"]),
        )


def note_on_metric(metric: str, classes: Mapping[str, Mapping[str, Any]], last: int | None = None) -> str:
    """What a printed metric is of: ``of the last batch (8 samples)`` if it had ``last`` ones, ``of spam``, or ``every
    sample was predicted as ham``."""
    if metric.startswith("train_"):
        return "of the last batch" if last is None else f"of the last batch ({last:,} sample{'s' * (last != 1)})"
    predicted = {name: values["predicted"] for name, values in classes.items() if values["predicted"]}
    samples = [values["samples"] for values in classes.values() if values["samples"]]
    one_of_each = sum(predicted.values()) == sum(samples)  # not several labels per sample
    if metric == "accuracy" and len(predicted) == 1 < len(samples) and one_of_each:
        return f"every sample was predicted as {next(iter(predicted))}"
    return f"of {[*classes][1]}" if metric.endswith("binary_f1") and len(classes) == 2 else ""


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
