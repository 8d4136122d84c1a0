"""Stand-ins for CUDA graphs on a CPU: a replay computes what was recorded again, in the same memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
from composer_speedups.algorithms.cuda_graphs.segments import blocks_to_cut
from composer_speedups.core.run import Run
from composer_speedups.packing.encoder import unpadded_encoders


def graphed(
    model: Any, max_graphs: int = 2, segments: int = 1, recorder: Any = None, *, accumulate: bool = False
) -> GraphedCalls:
    calls = GraphedCalls(model, model.forward, max_graphs, recorder=recorder or Rerun)
    calls.accumulate = accumulate
    calls.cut_behind, calls.reads_known_batch = cut_into(model, segments), bool(unpadded_encoders(model))
    calls.install("forward")
    return calls


def cut_into(model: Any, segments: int) -> list[Any]:
    """The blocks behind which to cut a backward pass into equal segments; none of a model that is not cut."""
    every = blocks_to_cut(model, 0)
    count = len(every) + 1
    segments = min(segments, count)
    return [every[i * count // segments - 1] for i in range(1, segments)]


def in_composer(model: Any) -> Run:
    """A run whose events may be called on a technique."""
    state: Any = SimpleNamespace(model=model)
    return Run(torch.device("cpu"), model=getattr(model, "module", model), state=state)


class Rerun:
    """A recorder with the methods of ``CUDARecorder``."""

    def __init__(self, pool: Any = None) -> None:
        self.pool = pool

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        mode, result = torch.is_grad_enabled(), run()

        def replay() -> None:
            with torch.set_grad_enabled(mode):  # a replay happens inside a backward pass
                again = run()
            for place, value in zip(result or (), again or (), strict=True):
                place.copy_(value)

        return result, replay


class CannotRecord(Rerun):
    """A recorder that fails as an unsupported capture does."""

    def record(self, run: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Logged(Rerun):
    """Logs the number of each graph that is replayed; 0 is the forward pass."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self._log, self._numbers = log, itertools.count()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        result, replay = super().record(run)
        number = next(self._numbers)

        def logged() -> None:
            self._log.append(number)
            replay()

        return result, logged
