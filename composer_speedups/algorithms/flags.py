"""Process-wide flags that a technique sets for as long as its run trains or evaluates, then gives back."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from composer.core import Event, State
from composer.loggers import Logger

from composer_speedups.algorithms.technique import OnUnavailable, Technique

__all__ = ["FlagTechnique"]

_SET_AT = (Event.FIT_START, Event.EVAL_STANDALONE_START, Event.EVAL_BEFORE_ALL, Event.PREDICT_START)
_GIVE_BACK_AT = (Event.FIT_END, Event.EVAL_STANDALONE_END, Event.EVAL_AFTER_ALL, Event.PREDICT_END)


class FlagTechnique(Technique):
    """A technique that sets process-wide flags.

    They are in force from INIT to the end of ``fit`` (so that models built or compiled in between see them),
    and again during every later ``fit``, ``eval`` and ``predict``. A run that raises gives them back when its
    Trainer closes. Giving back at FIT_END, not only at close, keeps an old Trainer's late clean-up from
    taking the flags of a new one.
    """

    def __init__(self, *, on_unavailable: OnUnavailable = "stop") -> None:
        super().__init__(on_unavailable=on_unavailable)
        self._saved: Any = None
        self._fitting = False

    @abstractmethod
    def read_flags(self) -> Any:
        """The flags as they are now; never None."""

    @abstractmethod
    def write_flags(self, flags: Any) -> None:
        """Set the flags to what :meth:`read_flags` returned, or to :meth:`wanted_flags`."""

    @abstractmethod
    def wanted_flags(self) -> Any:
        """The flags while the technique is in force."""

    def engage(self, state: State) -> dict[str, Any]:
        self.set_flags()
        return {"before": self._saved, "during": self.read_flags()}

    def match(self, event: Event, state: State) -> bool:
        return super().match(event, state) or (bool(self.engaged) and event in _SET_AT + _GIVE_BACK_AT)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        super().apply(event, state, logger)
        if not self.engaged:
            return
        if event == Event.FIT_START:
            self._fitting = True
        elif event == Event.FIT_END:
            self._fitting = False
        if event in _SET_AT:
            self.set_flags()
        elif event in _GIVE_BACK_AT and not self._fitting:
            self.give_back()

    def set_flags(self) -> None:
        if self._saved is None:
            self._saved = self.read_flags()
            self.write_flags(self.wanted_flags())

    def close(self) -> None:
        self.give_back()

    def give_back(self) -> None:
        if self._saved is not None:
            self.write_flags(self._saved)
            self._saved = None
