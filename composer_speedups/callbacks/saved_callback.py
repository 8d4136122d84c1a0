"""Base class of callbacks whose state is in checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar

from composer.core import Callback, State
from composer.loggers import Logger

__all__ = ["SavedCallback"]


class SavedCallback(Callback):
    """A callback of which checkpoints hold the attributes in :attr:`checkpoint_fields`, with their types.

    In each Trainer that it is given to, it starts anew. Composer's checkpoints hold one state per class; if a Trainer
    has several callbacks of a class, it lists the states of all, and each one loads its own.
    """

    checkpoint_fields: ClassVar[dict[str, Any]]
    _alike: Sequence[SavedCallback] = ()  # the Trainer's callbacks of this class

    def __init__(self) -> None:
        self.reset()

    def init(self, state: State, logger: Logger) -> None:
        self.reset()
        self._alike = [callback for callback in state.callbacks if type(callback) is type(self)]  # type: ignore[misc]

    def reset(self) -> None:
        """Initialize the attributes that are not settings."""

    def owns(self, state: dict[str, Any]) -> bool:
        """Whether a state in a checkpoint is that of this callback, and not of another one of its class."""
        return True

    def _fields(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in self.checkpoint_fields}

    def state_dict(self) -> dict[str, Any]:
        several = {"alike": [callback._fields() for callback in self._alike]} if len(self._alike) > 1 else {}
        return self._fields() | several

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = next((saved for saved in state.get("alike", [state]) if self.owns(saved)), None)
        if own is None:
            warnings.warn(f"the checkpoint has no state of {self!r}, which starts anew", UserWarning, stacklevel=2)
            return
        vars(self).update({name: own[name] for name in self.checkpoint_fields if name in own})
