"""Process-wide flags that a run sets for as long as it trains or evaluates, then gives back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from composer.core import Callback, State

from composer_speedups.core.technique import Technique

__all__ = ["MATMUL_PRECISION", "FlagTechnique", "Float32Matmuls", "ProcessFlag"]


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


class _HoldsFlag:
    """Sets a process-wide flag during ``fit``, ``eval`` and ``predict`` of its own Trainer only.

    So neither a Trainer built beside it nor the order in which both run or close can change what either sees. A
    run that raises gives the flag back when its Trainer closes.
    """

    flag: ClassVar[ProcessFlag]

    @abstractmethod
    def wanted_flag(self) -> Any:
        """The flag meanwhile."""

    def fit_start(self, state: State, *_: Any) -> None:
        self.flag.take(self, self.wanted_flag())

    def fit_end(self, state: State, *_: Any) -> None:
        self.flag.give_back(self)

    eval_standalone_start = eval_before_all = predict_start = fit_start
    eval_standalone_end = eval_after_all = predict_end = fit_end

    def close(self, *_: Any) -> None:
        self.flag.release(self)


class FlagTechnique(_HoldsFlag, Technique):
    """A technique that sets a process-wide flag during ``fit``, ``eval`` and ``predict`` of its own Trainer only."""

    def engage(self, state: State) -> dict[str, Any]:
        return {"before": self.flag.read(), "during": self.wanted_flag()}


class Float32Matmuls(_HoldsFlag, Callback):
    """Keeps float32 matmuls float32 during ``fit``, ``eval`` and ``predict`` of its own Trainer: an honest baseline.

    Composer's ``DeviceGPU`` turns TF32 on or off when it is made, and so for every other Trainer of the process.
    """

    flag = MATMUL_PRECISION

    def wanted_flag(self) -> str:
        return "highest"
