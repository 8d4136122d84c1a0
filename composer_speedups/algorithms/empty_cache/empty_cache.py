"""The empty cache technique: releases the allocator's cached blocks at an interval."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from composer.core import State
from pydantic import Field

from composer_speedups.algorithms.empty_cache.functional import apply_empty_cache
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import Stage, Technique
from composer_speedups.core.trainer_state import device_of

GIB = 2**30


class EmptyCache(Technique):
    """Releases the allocator's unused blocks after the first batch and then at an interval of batches.

    It frees memory for other processes and reduces fragmentation, but does not save time.

    Raises:
        TechniqueError: At INIT, without a GPU.
    """

    name = "empty_cache"
    stage = Stage.FLAGS
    exactness = "exact"
    trials = ()
    purpose = "saves memory"

    every: int = Field(100, ge=1)
    """Interval in batches."""

    def reset(self) -> None:
        super().reset()
        self._times = self._freed = 0

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_cuda(context, "the allocator's cache")

    def engage(self, state: State) -> dict[str, Any]:
        return {"every": self.every}

    def batch_end(self, state: State) -> None:
        if not self._times or state.timestamp.batch.value % self.every == 0:
            with torch.cuda.device(device_of(state)):
                self._freed += apply_empty_cache()
            self._times += 1

    def verify(self, state: State) -> dict[str, Any]:
        if not self._times:
            raise self.not_engaged("the cache was never emptied", "do not suppress the event BATCH_END")
        return {"times_emptied": self._times, "gib_given_back": round(self._freed / GIB, 3)}
