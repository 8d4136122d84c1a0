"""Process-wide flags that a run sets for as long as it trains or evaluates, then gives back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger

from composer_speedups.core.technique import Technique

__all__ = ["MATMUL_PRECISION", "FlagTechnique", "Float32Matmuls", "ProcessFlag"]

_TAKE_AT = (Event.FIT_START, Event.EVAL_STANDALONE_START, Event.EVAL_BEFORE_ALL, Event.PREDICT_START)
_GIVE_BACK_AT = (Event.FIT_END, Event.EVAL_STANDALONE_END, Event.EVAL_AFTER_ALL, Event.PREDICT_END)


class ProcessFlag:
    """One flag of the process, and the runs that hold it now: the last to take it has it as it wants.

    Runs may end in any order, or not at all until their Trainers close: what one that is not the last would give
    back goes to the one after it, and the last to leave restores what was there before the first.

    Args:
        read: The flag as it is now.
        write: Sets it to what ``read`` returned.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read, self._write = read, write
        self._held: list[tuple[object, Any]] = []  # owner, and what the flag was before it

    def take(self, owner: object, wanted: Any) -> None:
        """Set the flag; ``owner`` may hold it several times over, an evaluation inside a fit say."""
        self._held.append((owner, self.read()))
        self._write(wanted)

    def give_back(self, owner: object) -> None:
        """Undo the owner's latest :meth:`take`; without one, nothing."""
        index = next((i for i in reversed(range(len(self._held))) if self._held[i][0] is owner), None)
        if index is None:
            return
        _, before = self._held.pop(index)
        if index == len(self._held):
            self._write(before)
        else:
            self._held[index] = self._held[index][0], before

    def release(self, owner: object) -> None:
        """Undo every :meth:`take` of an owner that is gone."""
        while any(held is owner for held, _ in self._held):
            self.give_back(owner)


MATMUL_PRECISION = ProcessFlag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)


class FlagTechnique(Technique):
    """A technique that sets a process-wide flag during ``fit``, ``eval`` and ``predict`` of its own Trainer only.

    So neither a Trainer built beside it nor the order in which both run or close can change what either sees. A
    run that raises gives the flag back when its Trainer closes.
    """

    flag: ClassVar[ProcessFlag]

    @abstractmethod
    def wanted_flag(self) -> Any:
        """The flag while the technique is in force."""

    def engage(self, state: State) -> dict[str, Any]:
        return {"before": self.flag.read(), "during": self.wanted_flag()}

    def match(self, event: Event, state: State) -> bool:
        return super().match(event, state) or (self.applied and event in _TAKE_AT + _GIVE_BACK_AT)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        try:
            super().apply(event, state, logger)  # looks for the effect at FIT_END too
        finally:
            if self.applied and event in _GIVE_BACK_AT:
                self.flag.give_back(self)
        if self.applied and event in _TAKE_AT:
            self.flag.take(self, self.wanted_flag())

    def close(self) -> None:
        self.flag.release(self)


class Float32Matmuls(Callback):
    """Keeps float32 matmuls float32 during ``fit``, ``eval`` and ``predict`` of its own Trainer: an honest baseline.

    Composer's ``DeviceGPU`` turns TF32 on or off when it is made, and so for every other Trainer of the process.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        MATMUL_PRECISION.take(self, "highest")

    def fit_end(self, state: State, logger: Logger) -> None:
        MATMUL_PRECISION.give_back(self)

    eval_standalone_start = eval_before_all = predict_start = fit_start
    eval_standalone_end = eval_after_all = predict_end = fit_end

    def close(self, state: State, logger: Logger) -> None:
        MATMUL_PRECISION.release(self)
