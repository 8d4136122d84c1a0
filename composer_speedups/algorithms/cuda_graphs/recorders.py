"""What captures CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from composer_speedups.core.trainer_state import world_size


class Recorder(Protocol):
    """What captures; tests give their own."""

    def settle(self) -> None:
        """Wait for what was launched so far, which is no part of the capture's time."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run once, so that what is done at a kernel's first launch is not part of the graph."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What ``run`` returns, and a function that computes it again, from and to the same memory."""


class CUDARecorder:
    """Records CUDA graphs that share one memory pool.

    Args:
        pool: From ``torch.cuda.graph_pool_handle``; None makes one.
    """

    def __init__(self, pool: Any = None) -> None:
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def settle(self) -> None:
        torch.cuda.synchronize()

    def warm_up(self, run: Callable[[], None]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(_side_stream(torch.cuda.current_device())):
            run()
        torch.cuda.synchronize()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # On several ranks a thread of NCCL's asks the GPU how its work stands, which "global" forbids all threads.
        mode = "thread_local" if world_size() > 1 else "global"
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            result = run()
        return result, graph.replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace for each stream that it is used on."""
    return torch.cuda.Stream(device)
