"""Base class of callbacks whose state is in checkpoints."""

from __future__ import annotations

from copy import copy
from typing import Any, ClassVar

from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.core.errors import ConfigError


class SavedCallback(Callback):
    """A callback of which checkpoints hold the attributes named in :attr:`saved`.

    In each Trainer that it is given to, it starts anew.

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
