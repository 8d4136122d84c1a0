"""The history of a run: its evaluations, and what earlier processes of an interrupted run measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer.core import State
from composer.loggers import Logger

from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.process_age import process_age
from composer_speedups.tasks.metrics import final_metrics, reported_values


class RunHistory(SavedCallback):
    """Records evaluations, and preserves values of report.json across resumes.

    A run that was interrupted after its last batch and before its report trains nothing when resumed: it repeats the
    last evaluation and writes the report.

    Args:
        inputs: What the run reads, by content; see :func:`.inputs_of`.

    Attributes:
        evaluations: Batch number → metrics of the evaluation after it, named as in reports (``accuracy``).
        seconds: Batch number → seconds from the start of the run's process until that evaluation was over; a resumed
            run adds ``wall_seconds``.
        wall_seconds: Time of earlier processes, each up to the checkpoint that was resumed from. Neither training lost
            after that checkpoint nor the time between processes is included.
        resumed: One entry per resume, with the ``batch`` and ``checkpoint`` it resumed from. A process that was killed
            before it wrote a checkpoint is not counted.
        metrics: Loss and accuracy at the checkpoint; values that this process measures replace them.
    """

    saved = ("evaluations", "seconds", "wall_seconds", "resumed", "metrics")

    def __init__(self, inputs: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.inputs = inputs or {}
        super().__init__()

    def reset(self) -> None:
        self.evaluations: dict[int, dict[str, float]] = {}
        self.seconds: dict[int, float] = {}
        self.wall_seconds = 0.0
        self.resumed: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
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
