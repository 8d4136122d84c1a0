"""Let callbacks veto a scheduled checkpoint, and name the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Callable

from composer.callbacks import CheckpointSaver
from composer.core import Event, State

__all__ = ["checkpoint_allowed", "last_checkpoint", "resume_advice", "veto_checkpoints"]

Allow = Callable[[State, Event], bool]


def veto_checkpoints(state: State, allow: Allow) -> None:
    """Make every CheckpointSaver of the Trainer call ``allow`` before it writes a scheduled checkpoint.

    Several callbacks may register an ``allow``; a checkpoint is written only if all of them return True.

    Args:
        state: The Trainer's state, once the Trainer is built.
        allow: Returns whether to write the checkpoint. It is called on every rank and must return the same on each.
    """
    for callback in state.callbacks:
        if isinstance(callback, CheckpointSaver):
            interval = callback.save_interval
            if not isinstance(interval, _VetoedInterval):
                callback.save_interval = interval = _VetoedInterval(interval)
            if allow not in interval.allowed_by:  # fit() may be called again
                interval.allowed_by.append(allow)


def checkpoint_allowed(saver: CheckpointSaver, state: State, event: Event) -> bool:
    """Return whether every registered ``allow`` returns True, for a checkpoint that no interval schedules."""
    return all(allow(state, event) for allow in getattr(saver.save_interval, "allowed_by", ()))


class _VetoedInterval:
    def __init__(self, interval: Allow) -> None:
        self.interval, self.allowed_by = interval, list[Allow]()

    def __call__(self, state: State, event: Event) -> bool:
        return self.interval(state, event) and all(allow(state, event) for allow in self.allowed_by)


def last_checkpoint(state: State) -> str | None:
    """Return the last checkpoint that the Trainer wrote, or else the one that it was loaded from, or None."""
    for callback in state.callbacks:
        if isinstance(callback, CheckpointSaver) and callback.saved_checkpoints:
            return str(callback.saved_checkpoints[-1])
    return state.load_path


def resume_advice(state: State, changes: str) -> str:
    """Return advice: resume from the last checkpoint's weights with ``changes``, or set them if there is none."""
    last = last_checkpoint(state)
    return f"resume from {last} with checkpoint.weights_only=true and {changes}" if last else f"set {changes}"
