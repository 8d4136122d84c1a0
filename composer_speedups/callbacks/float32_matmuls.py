"""A callback that keeps TF32 off."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.core.flags import MATMUL_PRECISION


class Float32Matmuls(Callback):
    """Keeps float32 matmuls in true float32 during ``fit``, ``eval`` and ``predict`` of its own Trainer.

    Composer's ``DeviceGPU`` sets TF32 when it is constructed, which affects every Trainer in the process.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        MATMUL_PRECISION.take(self, "highest")

    def fit_end(self, state: State, logger: Logger) -> None:
        MATMUL_PRECISION.give_back(self)

    eval_standalone_start = eval_before_all = predict_start = fit_start
    eval_standalone_end = eval_after_all = predict_end = fit_end

    def close(self, state: State, logger: Logger) -> None:
        MATMUL_PRECISION.release(self)
