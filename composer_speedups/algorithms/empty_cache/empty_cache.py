"""The allocator's cached blocks given back to the GPU now and then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from composer.core import Event, State
from composer.loggers import Logger

from composer_speedups.algorithms.empty_cache.functional import apply_empty_cache
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import OnUnavailable, Stage, Technique
from composer_speedups.core.trainer_state import device_of

__all__ = ["EmptyCache"]

GIB = 2**30


class EmptyCache(Technique):
    """Gives the allocator's unused blocks back after the first batch and then every ``every`` batches.

    It frees memory for other processes and undoes fragmentation; it saves no time.

    Args:
        every: Batches between two times. Default 100.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: ``every`` below 1.
        TechniqueError: At INIT, without a GPU.
    """

    name = "empty_cache"
    stage = Stage.FLAGS

    def __init__(self, every: int = 100, *, on_unavailable: OnUnavailable = "stop") -> None:
        super().__init__(on_unavailable=on_unavailable)
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self.every = every
        self._times = self._freed = 0

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_cuda(context, "the allocator's cache")

    def engage(self, state: State) -> dict[str, Any]:
        return {"every": self.every}

    def match(self, event: Event, state: State) -> bool:
        return super().match(event, state) or (bool(self.engaged) and event == Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if self.engaged and event == Event.BATCH_END:
            batch = state.timestamp.batch.value
            if not self._times or batch % self.every == 0:
                with torch.cuda.device(device_of(state)):
                    self._freed += apply_empty_cache()
                self._times += 1
        if super().match(event, state):
            super().apply(event, state, logger)

    def verify(self, state: State) -> dict[str, Any]:
        if not self._times:
            raise self.not_engaged("the cache was never emptied", "keep BATCH_END for it")
        return {"times_emptied": self._times, "gib_given_back": round(self._freed / GIB, 3)}
