"""Stop a run whose loss climbs far above its level at the last good checkpoint."""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

from composer.core import Event, State
from composer.loggers import Logger

from composer_speedups.callbacks.checkpoint_veto import last_checkpoint, resume_advice, veto_checkpoints
from composer_speedups.callbacks.config import DivergenceConfig
from composer_speedups.callbacks.nonfinite import circumstances
from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.errors import RunFailedError

__all__ = ["DivergenceGuard"]

log = logging.getLogger(__name__)


class DivergenceGuard(DivergenceConfig, SavedCallback, eq=False):
    """Compares the smoothed training loss with its value at the last good checkpoint, or at the start.

    While the loss is above ``factor`` times that value plus ``margin``, checkpoints are not written, so that the last
    good one is neither overwritten nor deleted. After ``batches`` consecutive batches above the limit the run stops and
    names that checkpoint. The value at the start is the smoothed loss after 1 / (1 - smoothing) batches. Batches with a
    NaN or infinite loss are ignored here; :class:`FiniteLoss` handles them.

    Composer already reads the loss of each batch over all ranks, so this adds no synchronization.

    Logged for each batch: ``numerics/smoothed_loss``.

    Args:
        factor: At least 1. Default 1.5.
        margin: Added to the limit, so that a loss close to 0 does not count as diverged. Default 0.1.
        batches: Number of consecutive batches above the limit. Default 50.
        smoothing: Weight of the past in the exponential moving average, 0 to 0.9999. Default 0.9.

    Raises:
        ValueError: A setting is out of its range.
        RunFailedError: From ``fit``.
    """

    checkpoint_fields: ClassVar[dict[str, Any]] = {
        "reference": float | None,
        "withheld": int,
        "_sum": float,
        "_weight": float,
        "_seen": int,
        "_above": int,
    }

    def reset(self) -> None:
        self.reference: float | None = None
        self.withheld = 0  # number of checkpoints that were not written
        self._sum = self._weight = 0.0
        self._seen = self._above = 0

    @property
    def smoothed(self) -> float:
        """The bias-corrected moving average."""
        return self._sum / self._weight

    @property
    def limit(self) -> float:
        return math.inf if self.reference is None else self.factor * self.reference + self.margin

    def fit_start(self, state: State, logger: Logger) -> None:
        veto_checkpoints(state, self._may_save)

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = state.total_loss_dict.get("loss/train/total", math.nan)
        if not math.isfinite(loss):
            return
        self._sum = self.smoothing * self._sum + (1 - self.smoothing) * loss
        self._weight = self.smoothing * self._weight + (1 - self.smoothing)
        self._seen += 1
        logger.log_metrics({"numerics/smoothed_loss": self.smoothed})
        if self.reference is None and self._seen * (1 - self.smoothing) >= 1 - 1e-9:
            self.reference = self.smoothed
        self._above = self._above + 1 if self.smoothed > self.limit else 0
        if self._above >= self.batches:
            raise RunFailedError(
                f"loss: diverged at {circumstances(state)}: for {self._above} batches its smoothed value was above "
                f"{self.limit:.4g}; it is {self.smoothed:.4g} and was {self.reference:.4g} "
                f"{'at the last good checkpoint' if last_checkpoint(state) else 'at the start'}; "
                + resume_advice(state, "a lower optimizer.lr, or optimizer.max_grad_norm")
            )

    def _may_save(self, state: State, event: Event) -> bool:
        if self._above:
            self.withheld += 1
            log.warning("loss: %.4g is above %.4g: no checkpoint is written", self.smoothed, self.limit)
            return False
        if self._weight and self.reference is not None:
            self.reference = self.smoothed
        return True

    def summary(self) -> dict[str, Any]:
        """The entry in the ``guards`` section of report.json."""
        return {
            "smoothed_loss": self.smoothed if self._weight else None,
            "loss_at_last_good_checkpoint": self.reference,
            "checkpoints_withheld": self.withheld,
        }
