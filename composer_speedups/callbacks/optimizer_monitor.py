"""The learning rate and the gradient norm of each batch."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.distributed.fsdp import GradientClipping
from composer_speedups.distributed.host_scalars import HostCopy

__all__ = ["OptimizerMonitor"]


class OptimizerMonitor(Callback):
    """Logs ``optimizer/learning_rate`` and, if gradients are clipped, ``optimizer/gradient_norm``.

    The learning rate is that of the first parameter group in the batch's step. The norm is the global L2 norm before
    clipping, which :class:`.GradientClipping` computes anyway. It is logged one batch late, when its copy has reached
    the host, so that the host does not wait. Without clipping it is not computed, since that would read every gradient
    once more and prevent DDP's optimizer steps from overlapping with communication.
    """

    def __init__(self) -> None:
        self._sent: HostCopy | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        self._sent = None

    def batch_start(self, state: State, logger: Logger) -> None:
        logger.log_metrics({"optimizer/learning_rate": float(state.optimizers[0].param_groups[0]["lr"])})

    def batch_end(self, state: State, logger: Logger) -> None:
        self._receive(logger)
        clipping = next((a for a in state.algorithms if isinstance(a, GradientClipping)), None)
        if clipping is not None and clipping.norm is not None:
            self._sent = HostCopy(clipping.norm)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._receive(logger)

    def _receive(self, logger: Logger) -> None:
        if self._sent is not None:
            norm, self._sent = self._sent.receive(), None
            logger.log_metrics({"optimizer/gradient_norm": norm})
