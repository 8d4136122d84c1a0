"""A say in whether a checkpoint that is due is written, and which one to go back to."""

from __future__ import annotations

from collections.abc import Callable

from composer.callbacks import CheckpointSaver
from composer.core import Event, State

__all__ = ["ask_before_saving", "go_back_with", "last_checkpoint", "may_save"]

Ask = Callable[[State, Event], bool]


def ask_before_saving(state: State, ask: Ask) -> None:
    """Have every CheckpointSaver of the Trainer ask first, once a checkpoint is due; several may ask.

    Args:
        state: Of the Trainer, once it is built.
        ask: Whether to write it. Every rank asks, and has to be told the same.
    """
    for callback in state.callbacks:
        if isinstance(callback, CheckpointSaver):
            due = callback.save_interval
            if not isinstance(due, _Due):
                callback.save_interval = due = _Due(due)
            if ask not in due.asks:  # fit() may be called again
                due.asks.append(ask)


def may_save(saver: CheckpointSaver, state: State, event: Event) -> bool:
    """What those say who want to be asked, of a checkpoint that no interval makes due."""
    return all(ask(state, event) for ask in getattr(saver.save_interval, "asks", ()))


class _Due:
    def __init__(self, due: Ask) -> None:
        self.due, self.asks = due, list[Ask]()

    def __call__(self, state: State, event: Event) -> bool:
        return self.due(state, event) and all(ask(state, event) for ask in self.asks)


def last_checkpoint(state: State) -> str | None:
    """The last checkpoint that the Trainer wrote, or else the one that it was loaded from."""
    for callback in state.callbacks:
        if isinstance(callback, CheckpointSaver) and callback.saved_checkpoints:
            return str(callback.saved_checkpoints[-1])
    return state.load_path


def go_back_with(state: State, changes: str) -> str:
    """The advice to train on from the last checkpoint's weights with ``changes``, or anew where there is none."""
    last = last_checkpoint(state)
    return f"resume from {last} with checkpoint.weights_only=true and {changes}" if last else f"set {changes}"
