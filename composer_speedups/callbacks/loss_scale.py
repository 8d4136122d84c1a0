"""Monitor fp16's gradient scaler: its scale, and the steps it skips."""

from __future__ import annotations

from typing import Any, ClassVar

from composer.core import Precision, State
from composer.loggers import Logger

from composer_speedups.callbacks.nonfinite import circumstances
from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.errors import RunFailedError
from composer_speedups.distributed.host_scalars import HostCopy

__all__ = ["LossScaleMonitor"]

MIN_SCALE = 1e-4  # as fairseq's --min-loss-scale: with a smaller scale, gradients overflow at any scale


class LossScaleMonitor(SavedCallback):
    """Counts the steps that the gradient scaler skips because gradients overflowed in fp16.

    It does nothing in other precisions. The scaler halves the scale at each skipped step and doubles it after 2,000
    steps without one. The scale is read one batch late, when its copy has reached the host, so that the host does not
    wait. Weights stay finite: skipped steps are harmless unless the scale keeps falling.

    Logged for each batch, one batch late: ``numerics/loss_scale``, and ``numerics/loss_scale_skips`` so far.

    Raises:
        RunFailedError: From ``fit``, if the scale falls below 1e-4.
    """

    checkpoint_fields: ClassVar[dict[str, Any]] = {"skips": int}

    def reset(self) -> None:
        self.scale: float | None = None
        self.skips = 0
        self._sent: HostCopy | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.precision == Precision.AMP_FP16 and state.scaler is not None:
            self._sent, self.scale = None, state.scaler.get_scale()

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.precision != Precision.AMP_FP16 or state.scaler is None:
            return
        self._receive(state, logger)
        scale = state.scaler._get_scale_async()
        if scale is not None:
            self._sent = HostCopy(scale.detach().clone())  # the next update writes to the same memory

    def fit_end(self, state: State, logger: Logger) -> None:
        self._receive(state, logger)

    def _receive(self, state: State, logger: Logger) -> None:
        if self._sent is None:
            return
        scale, self._sent = self._sent.receive(), None
        self.skips += self.scale is not None and scale < self.scale
        self.scale = scale
        logger.log_metrics({f"numerics/{name}": value for name, value in self.summary().items()})
        if scale < MIN_SCALE:
            raise RunFailedError(
                f"loss scale: {scale:.3g} at {circumstances(state)}, after {self.skips} steps whose gradients "
                "overflowed; they overflow at any scale: train in bf16 or fp32, or lower optimizer.lr"
            )

    def summary(self) -> dict[str, float]:
        """The entry in the ``guards`` section of report.json; empty in precisions other than fp16."""
        return {} if self.scale is None else {"loss_scale": self.scale, "loss_scale_skips": self.skips}
