"""SIGTERM and Ctrl-C: the batch is finished and a checkpoint written before the process ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from composer.devices import Device
from composer.utils import dist

from composer_speedups.core.trainer_state import max_over_ranks

__all__ = ["StopSignals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Notes SIGTERM and SIGINT inside a ``with`` block, for training to end after a whole batch.

    Before training, and in a run without checkpoints, they end the process at once. After training, they are ignored:
    the report takes a moment. A second Ctrl-C always ends the process at once. Composer's launcher passes a Ctrl-C on
    as a SIGTERM too, which therefore is no second one.

    With several ranks, all stop after the same batch once one of them got a signal.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._phase = "at once"
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {signum: signal.signal(signum, self._note) for signum in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def defer(self) -> None:
        """From now on, wait for the end of the batch."""
        self._phase = "after the batch"

    def at_once(self) -> None:
        """Training has failed: there is no end of the batch to wait for."""
        self._phase = "at once"

    def ignore(self) -> None:
        """Training is over."""
        self._phase = "never"

    def agreed(self, device: Device) -> int | None:
        """The signal that any rank received so far; every rank must call. ``device`` is where ranks talk."""
        return max_over_ranks(device, self.received or 0) or None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            os._exit(128 + signum)
        if self._phase == "at once":
            sys.exit(128 + signum)
        self.received = self.received or signum
        name = signal.Signals(signum).name
        if dist.get_global_rank() == 0 and self._phase == "after the batch":
            # not print: the signal may have come in the middle of one
            os.write(
                2, f"\n{name}: finishing the batch and writing a checkpoint; Ctrl-C (again) stops at once\n".encode()
            )
