"""The empty cache technique: releases the allocator's cached blocks at an interval."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_composer, needs_cuda
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import Order, Technique


class EmptyCache(Technique):
    """Releases the allocator's unused blocks after the first batch and then at an interval of batches.

    It frees memory for other processes and reduces fragmentation, but does not save time.

    Raises:
        Refusal: At INIT, without a GPU.

    Source: torch.cuda.empty_cache.
    """

    name = "empty_cache"
    order = Order.FLAGS
    effect = "exact"
    purpose = "saves memory"

    every: int = Field(100, ge=1)
    """Interval in batches."""

    def reset(self) -> None:
        super().reset()
        self._times = 0

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from needs_composer(self.name, run, "the interval")
        yield from needs_cuda(self.name, run, "the allocator's cache")

    def engage(self, run: Run) -> dict[str, Any]:
        return {"every": self.every}

    def batch_end(self, run: Run) -> None:
        assert run.state is not None
        if not self._times or run.state.timestamp.batch.value % self.every == 0:
            import torch

            with torch.cuda.device(run.device):
                torch.cuda.empty_cache()
            self._times += 1

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        return self.summary(run)

    def summary(self, run: Run) -> dict[str, Any]:
        return {"times_emptied": self._times}
