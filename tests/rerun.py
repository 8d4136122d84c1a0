"""In place of CUDA graphs, where there is no GPU: what was recorded is computed again, from and to the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls

__all__ = ["CannotRecord", "Rerun", "graphed"]


def graphed(model: Any, max_graphs: int = 2) -> GraphedCalls:
    calls = GraphedCalls(model, model.forward, max_graphs, recorder=Rerun)
    calls.install("forward")
    return calls


class Rerun:
    """A recorder as :class:`~composer_speedups.algorithms.cuda_graphs.capture.CUDARecorder` is."""

    def __init__(self, pool: Any = None) -> None:
        self.pool = pool

    def settle(self) -> None:
        pass

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        with torch.enable_grad():  # a replay happens inside a backward pass
            result = run()

        def replay() -> None:
            with torch.enable_grad():
                again = run()
            for place, value in zip(result or (), again or (), strict=True):
                place.copy_(value)

        return result, replay


class CannotRecord(Rerun):
    """Fails as a capture does."""

    def record(self, run: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
