"""Count compilations and captures of CUDA graphs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import sub
from typing import NamedTuple

from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
from torch._dynamo.utils import compilation_time_metrics, counters

# the backward graph is compiled at the first backward pass
_COMPILE_PHASES = ("_compile.compile_inner", "backward._backward_impl")


class CompileCounts(NamedTuple):
    graphs: int  # graphs captured
    breaks: int  # graph breaks
    recompiles: int  # recompilations because of a failed guard
    failed: int  # frames that run eagerly
    seconds: float  # compile time of forward and backward graphs

    def since(self, earlier: CompileCounts) -> CompileCounts:
        return CompileCounts(*map(sub, self, earlier))


_apart = CompileCounts(0, 0, 0, 0, 0.0)  # counts inside counted_apart()


@contextmanager
def counted_apart() -> Iterator[None]:
    """Exclude compilations inside the block from :func:`compile_counts`, for example those of the optimizer's step."""
    global _apart
    before = compile_counts()  # without the counts excluded so far
    try:
        yield
    finally:
        _apart = _all_counts().since(before)


def compile_counts() -> CompileCounts:
    """Cumulative counts; ``get_compilation_metrics`` would keep only the last 64 compilations."""
    return _all_counts().since(_apart)


def _all_counts() -> CompileCounts:
    frames = counters["frames"]
    return CompileCounts(
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        recompiles=sum(n - 1 for n in FRAME_COMPILE_COUNTER.values()),
        failed=frames["total"] - frames["ok"],
        seconds=sum(sum(compilation_time_metrics.get(phase, ())) for phase in _COMPILE_PHASES),
    )


_captures = 0


def count_capture() -> None:
    """Note that a CUDA graph is captured in this batch."""
    global _captures
    _captures += 1


def graphs_so_far() -> int:
    """Graphs that torch.compile compiled and CUDA graphs that were captured; a batch that adds one is not steady."""
    return int(counters["stats"]["unique_graphs"]) + _captures
