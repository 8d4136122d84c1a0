"""Loggers whose errors do not end the training that they record."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partialmethod
from typing import Any

from composer.core import Event, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from composer_speedups.core.errors import failure_line, first_line
from composer_speedups.distributed.gradient_readers import reads_no_gradients

__all__ = ["GuardedLogger"]


class GuardedLogger(LoggerDestination):
    """Base class that switches a logger off when it raises, instead of ending the run.

    Derive from it and from the logger: ``class Mine(GuardedLogger, WandBLogger)``. Until training starts, errors are
    raised as usual, because nothing is lost yet. From then on, the first error is printed in one line on stderr and
    kept in :attr:`failure`, and the logger receives no further events and values. It is still closed at the end, so
    that it can write what it has received.

    Attributes:
        label: The name of the logger in messages.
        failure: What failed, when and why, in one line; None if nothing did.
    """

    label = "logger"
    failure: str | None = None
    _training: State | None = None
    _closing = False

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Record an error of the block instead of raising it."""
        try:
            yield
        except Exception as error:
            # torch's signal handler raises in any line when a data worker dies
            if self._training is None or first_line(error).startswith("DataLoader worker"):
                raise
            if self.failure is None:
                rank = f" on rank {dist.get_global_rank()}" if dist.get_global_rank() else ""
                when = "when it was closed" if self._closing else f"after batch {self._training.timestamp.batch.value}"
                self.failure = failure_line(f"{self.label}{rank}", f"failed {when}", error)
                with suppress(OSError):  # the terminal may be gone
                    print(f"{self.failure}; the run continues without it", file=sys.stderr, flush=True)

    def _receive(self, method: str, *arguments: Any, **named: Any) -> None:
        if self.failure is None:
            with self.guard():
                getattr(super(), method)(*arguments, **named)

    @reads_no_gradients
    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:  # of a Trainer, which may be a second one
            self.failure, self._training, self._closing = None, None, False
        elif event == Event.FIT_START:
            self._training = state
        self._receive("run_event", event, state, logger)

    log_hyperparameters = partialmethod(_receive, "log_hyperparameters")
    log_metrics = partialmethod(_receive, "log_metrics")
    log_traces = partialmethod(_receive, "log_traces")
    log_table = partialmethod(_receive, "log_table")
    log_images = partialmethod(_receive, "log_images")
    upload_file = partialmethod(_receive, "upload_file")

    def close(self, state: State, logger: Logger) -> None:
        self._closing = True
        with self.guard():
            super().close(state, logger)

    def post_close(self) -> None:
        with self.guard():
            super().post_close()
