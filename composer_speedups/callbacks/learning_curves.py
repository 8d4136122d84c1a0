"""The training loss of each batch and the metrics of each evaluation, recorded for the plot of a run."""

from __future__ import annotations

from typing import Any, ClassVar

from composer.core import State
from composer.loggers import Logger

from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.process_age import process_age
from composer_speedups.tasks.metrics import reported_values

__all__ = ["LearningCurves"]


class LearningCurves(SavedCallback):
    """Records values that Composer has already read, so that it adds no synchronization.

    Attributes:
        losses: Batch number → training loss of the batch, averaged over ranks.
        evaluations: Batch number → metrics of the evaluation after it, named as in reports (``accuracy``).
        seconds: Batch number → seconds from the start of the run's process until that evaluation was over; a resumed
            run adds the time of earlier processes up to its checkpoint.
        elapsed: Seconds of earlier processes, each up to the checkpoint that was resumed from.
    """

    checkpoint_fields: ClassVar[dict[str, Any]] = {
        "losses": dict[int, float],
        "evaluations": dict[int, dict[str, float]],
        "seconds": dict[int, float],
        "elapsed": float,
    }

    def reset(self) -> None:
        self.losses: dict[int, float] = {}
        self.evaluations: dict[int, dict[str, float]] = {}
        self.seconds: dict[int, float] = {}
        self.elapsed = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "elapsed": self.elapsed + process_age()}

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.total_loss_dict:  # fp16 skips steps with overflowing gradients
            self.losses[state.timestamp.batch.value] = float(state.total_loss_dict["loss/train/total"])

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self.evaluations[state.timestamp.batch.value] = reported_values(state.eval_metric_values)
        self.seconds[state.timestamp.batch.value] = self.elapsed + process_age()

    def of_evaluations(self, name: str) -> dict[int, float]:
        """Batch number → one metric of the evaluation after it; empty if the task does not have this metric."""
        return {batch: values[name] for batch, values in self.evaluations.items() if name in values}

    def summary(self) -> list[dict[str, float]]:
        """The ``evaluations`` of report.json: batch, seconds and metrics of each."""
        return [{"batch": b, "seconds": self.seconds[b], **values} for b, values in self.evaluations.items()]
