"""Where the wall clock of a run goes: every moment between two events belongs to one phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from composer.core import Event

__all__ = ["PhaseClock"]

# The phase that begins at an event and lasts until the next listed one. Checkpoints are written by a callback
# that runs after ours at the two CHECKPOINT events, so their phase lasts until whatever comes next.
_BEGINS = {
    Event.FIT_START: "start",
    Event.EPOCH_START: "between",
    Event.BEFORE_DATALOADER: "data",
    Event.AFTER_DATALOADER: "step",
    Event.BATCH_END: "between",
    Event.EVAL_BEFORE_ALL: "eval",
    Event.EVAL_AFTER_ALL: "between",
    Event.BATCH_CHECKPOINT: "checkpoint",
    Event.EPOCH_END: "between",
    Event.EPOCH_CHECKPOINT: "checkpoint",
    Event.ITERATION_END: "between",
    Event.FIT_END: "done",
}


class PhaseClock:
    """Seconds spent in each phase: ``start``, ``data``, ``step``, ``eval``, ``checkpoint``, ``between``.

    Args:
        now: The clock, in seconds; tests give their own.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._phase: str | None = None
        self._since = 0.0
        self.seconds: dict[str, float] = defaultdict(float)

    def event(self, event: Event) -> None:
        """Close the phase that this event ends, and begin the next one."""
        phase = _BEGINS.get(event)
        if phase is None or (self._phase == "eval" and event != Event.EVAL_AFTER_ALL):
            return  # evaluation has BEFORE_DATALOADER and AFTER_DATALOADER of its own
        now = self.now()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = (None, now) if phase == "done" else (phase, now)

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by phase."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken
