"""The interface to CUDA graph capture, which tests replace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from composer_speedups.core.trainer_state import world_size


class Recorder(Protocol):
    """Captures functions for replay; tests have their own implementations."""

    def settle(self) -> None:
        """Wait for kernels that were already launched, so that the capture's time does not include them."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run once, so that work of a kernel's first launch is not captured."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return the result of ``run``, and a function that recomputes it in the same memory."""


class CUDARecorder:
    """Captures CUDA graphs that share a memory pool.

    Args:
        pool: A handle from ``torch.cuda.graph_pool_handle``; None creates a pool.
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
        # On several ranks, a thread of NCCL queries CUDA events, which "global" forbids in every thread.
        mode = "thread_local" if world_size() > 1 else "global"
        # The warm-up's stream: autograd nodes of the parameters may outlive the warm-up, and belong to its stream.
        stream = _side_stream(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
            result = run()
        return result, graph.replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the only side stream of a device, because cuBLAS keeps a workspace for each stream that uses it."""
    return torch.cuda.Stream(device)
