"""Stops the start-up clock at the end of the first trained step."""

from __future__ import annotations

import torch
from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.core.trainer_state import device_of
from composer_speedups.train.startup import StartupClock

__all__ = ["StartupTimes"]


class StartupTimes(Callback):
    """Logs ``startup/<phase>_seconds`` and ``startup/to_first_step_seconds`` after the first trained batch.

    The GPU has finished the batch by then: the one synchronisation of it, not part of a steady step.

    Args:
        clock: Running since the start of the process.
    """

    def __init__(self, clock: StartupClock) -> None:
        self.clock = clock
        self._done = False

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._done:
            return
        self._done = True
        if device_of(state).type == "cuda":
            torch.cuda.synchronize(device_of(state))
        self.clock.lap("first_step")
        logger.log_metrics({f"startup/{name}": seconds for name, seconds in self.summary().items()})

    def summary(self) -> dict[str, float]:
        """The ``startup`` section of report.json; empty before the first batch."""
        return self.clock.summary() if self._done else {}
