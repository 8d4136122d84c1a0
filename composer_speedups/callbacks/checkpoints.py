"""Callbacks and checkpoints: find a callback, keep its state in them, veto them, and name the one to resume from."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from composer.callbacks import CheckpointSaver
from composer.core import Callback, Event, State
from composer.loggers import Logger

from composer_speedups.core.errors import ConfigError

C = TypeVar("C", bound=Callback)


class SavedCallback(Callback):
    """A callback of which checkpoints hold the attributes named in :attr:`saved`. In each Trainer it starts anew.

    Raises:
        ConfigError: A Trainer has two callbacks of a class. Composer's checkpoints hold one state per class.
    """

    saved: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.reset()

    def init(self, state: State, logger: Logger) -> None:
        if sum(type(callback) is type(self) for callback in state.callbacks) > 1:
            name = type(self).__name__
            raise ConfigError(
                f"callbacks: {name} is listed twice, and checkpoints hold one state per class; derive a class from "
                f"{name} for the second one"
            )
        self.reset()

    def reset(self) -> None:
        """Initialize the attributes that are not settings."""

    def state_dict(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: state[name] for name in self.saved if name in state})


def callback_of(state: State, kind: type[C]) -> C | None:
    """The Trainer's callback of this class; None if it has none."""
    return next((callback for callback in state.callbacks if isinstance(callback, kind)), None)


Allow = Callable[[State, Event], bool]


def veto_checkpoints(state: State, allow: Allow) -> None:
    """Make every CheckpointSaver of the Trainer ask ``allow`` on every rank before it writes a scheduled checkpoint."""
    for saver in state.callbacks:
        if isinstance(saver, CheckpointSaver):
            interval = saver.save_interval
            saver.save_interval = _Vetoed(interval.interval if isinstance(interval, _Vetoed) else interval, allow)


@dataclass
class _Vetoed:
    interval: Allow
    allow: Allow

    def __call__(self, state: State, event: Event) -> bool:
        return self.interval(state, event) and self.allow(state, event)


def checkpoint_allowed(saver: CheckpointSaver, state: State, event: Event) -> bool:
    """Whether the saver may write a checkpoint that no interval schedules."""
    interval = saver.save_interval
    return not isinstance(interval, _Vetoed) or interval.allow(state, event)


def last_checkpoint(state: State) -> str | None:
    """The last checkpoint that the Trainer wrote, or else the one that it was loaded from, or None."""
    saved = [c.saved_checkpoints[-1] for c in state.callbacks if isinstance(c, CheckpointSaver) and c.saved_checkpoints]
    return str(saved[0]) if saved else state.load_path


def resume_advice(state: State, changes: str) -> str:
    """Advice to resume from the last checkpoint's weights with ``changes``, or to set them if there is none."""
    last = last_checkpoint(state)
    return f"resume from {last} with checkpoint.weights_only=true and {changes}" if last else f"set {changes}"
