"""Let a callback veto checkpoints, and name the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from composer.callbacks import CheckpointSaver
from composer.core import Event, State

Allow = Callable[[State, Event], bool]


def veto_checkpoints(state: State, allow: Allow) -> None:
    """Make every CheckpointSaver of the Trainer call ``allow`` before it writes a scheduled checkpoint.

    Args:
        state: The Trainer's state, once the Trainer is built.
        allow: Returns whether to write the checkpoint. It is called on every rank and must return the same on each.
    """
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
