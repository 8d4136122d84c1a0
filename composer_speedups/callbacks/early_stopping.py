"""Stop training when a metric of the evaluations no longer improves."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from composer.callbacks import EarlyStopper
from composer.core import State, Timestamp
from composer.loggers import Logger

from composer_speedups.callbacks.config import EarlyStoppingConfig
from composer_speedups.callbacks.evaluated_metric import (
    EVALUATED_FIELDS,
    compares_alike,
    is_evaluation_of,
    metric_of_evaluator,
)
from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.trainer_state import any_rank

__all__ = ["EarlyStopping"]


class EarlyStopping(EarlyStoppingConfig, SavedCallback, eq=False):
    """Composer's ``EarlyStopper``, with its state in checkpoints.

    Composer's forgets the best value when a run is resumed, and continues a run that it had stopped. Here a resumed run
    stops after the same batch as an uninterrupted one. A NaN is never the best value, and all ranks stop after the same
    batch.

    As in Composer, training stops at the first evaluation that comes more than ``patience`` after the last improvement.
    With an evaluation per epoch and a patience of 1 epoch, that is the second one in a row without an improvement.

    Args:
        metric: A metric of the evaluation, by its logged name (``MulticlassAccuracy``) or its name in report.json
            (``accuracy``). Default ``"loss"``.
        mode: ``"min"`` or ``"max"``: which values are better. Default None: as the metric's ``higher_is_better`` says,
            or else ``"min"`` for a loss, error or perplexity and ``"max"`` for other metrics.
        patience: A Composer time in epochs or batches. Default ``"1ep"``.
        min_delta: Only a change by more than this counts as an improvement. Default 0.
        dataloader_label: Label of the evaluator. Default ``"eval"``.

    Attributes:
        best: The best value so far; None before the first evaluation.
        best_batch: The number of batches trained before it.
        stopped: Whether training was stopped before its ``max_duration``.

    Raises:
        ConfigError: From ``fit``, if there is no such evaluator or metric.
    """

    dataloader_label: str = "eval"
    """Label of the evaluator."""

    checkpoint_fields: ClassVar[dict[str, Any]] = EVALUATED_FIELDS | {
        "best": float | None,
        "best_epoch": int,
        "best_batch": int,
        "stopped": bool,
    }

    def reset(self) -> None:
        super().reset()
        self.best: float | None = None
        self.best_epoch = self.best_batch = 0
        self.stopped = self._had_stopped = False
        self._reported = self.metric  # the metric's name in report.json
        self._stopper: Any = None  # Composer declares its attributes as None

    def owns(self, state: dict[str, Any]) -> bool:
        return compares_alike(vars(self), state)

    def after_load(self, state: State, logger: Logger) -> None:
        self._had_stopped = self.stopped

    def fit_start(self, state: State, logger: Logger) -> None:
        found = metric_of_evaluator(state, self.dataloader_label, self.metric)
        self._reported, self.mode = found.reported, self.mode or found.mode
        comparison = "less" if self.mode == "min" else "greater"
        self._stopper = EarlyStopper(found.logged, self.dataloader_label, comparison, self.min_delta, self.patience)
        self._set_best()
        self.stopped, self._had_stopped = self._had_stopped, False  # a later fit() continues
        if self.stopped:
            state.stop_training()  # the run was interrupted after training had stopped

    def eval_end(self, state: State, logger: Logger) -> None:
        if self._stopper is None or not is_evaluation_of(state, self.dataloader_label):
            return
        until = state.max_duration
        unfinished = until is not None and state.timestamp < until
        self._stopper.eval_end(state, logger)
        self.best, occurred = float(self._stopper.best), self._stopper.best_occurred
        self.best_epoch, self.best_batch = occurred.epoch.value, occurred.batch.value
        self._set_best()
        if unfinished and any_rank(state.device, state.max_duration is not until):
            self.stopped = True
            state.stop_training()

    def _set_best(self) -> None:
        """Set what Composer compares with, in float64 so that a resumed run compares the same numbers."""
        if self.best is not None and not math.isnan(self.best):
            self._stopper.best = torch.tensor(self.best, dtype=torch.float64)
            self._stopper.best_occurred = Timestamp(epoch=self.best_epoch, batch=self.best_batch)
        else:  # no value is better than NaN
            self._stopper.best = self._stopper.best_occurred = None

    def summary(self) -> dict[str, Any]:
        """The section ``early_stopping`` of report.json."""
        return {
            "metric": self._reported,
            "mode": self.mode,
            "stopped": self.stopped,
            "best": self.best,
            "best_batch": self.best_batch,
        }
