"""The history of a run before it was interrupted, saved in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.core.process_age import process_age
from composer_speedups.tasks.metrics import final_metrics

__all__ = ["RunHistory"]


class RunHistory(Callback):
    """Preserves values of report.json across resumes that other parts of a checkpoint do not hold.

    A run that was interrupted after its last batch and before its report trains nothing when resumed: it repeats the
    last evaluation and writes the report.

    Args:
        inputs: What the run reads, by content; see :func:`.inputs_of`.

    Attributes:
        wall_seconds: Time of earlier processes, each up to the checkpoint that was resumed from. Neither training lost
            after that checkpoint nor the time between processes is included.
        resumed: One entry per resume, with the ``batch`` and ``checkpoint`` it resumed from. A process that was killed
            before it wrote a checkpoint is not counted.
        metrics: Loss and accuracy at the checkpoint; values that this process measures replace them.
    """

    def __init__(self, inputs: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.inputs = inputs or {}
        self.wall_seconds = 0.0
        self.resumed: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self._over = False
        self._state: State | None = None

    def init(self, state: State, logger: Logger) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        assert self._state is not None
        return {
            "wall_seconds": self.wall_seconds + process_age(),
            "resumed": self.resumed,
            "metrics": {**self.metrics, **final_metrics(self._state)},
            "inputs": self.inputs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wall_seconds = state["wall_seconds"]
        self.resumed = list(state["resumed"])
        self.metrics = dict(state["metrics"])
