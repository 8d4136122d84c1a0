"""Kernels of a profiled step by kind, and the time in which none ran."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["KINDS", "Kernel", "busy", "by_kind", "by_name", "exposed", "kernels_of_trace", "kind_of"]

# The first pattern that a name holds decides. Inductor's names list what was fused, so several may fit.
_PATTERNS = {
    "communication": r"nccl|gloo|c10d::",
    "attention": r"flash|fmha|attention|sdpa|^(?!.*log_?softmax).*softmax",
    "optimizer": r"adam|multi_tensor_apply|optimizer",
    "scaling to float8": r"triton.*_scaled_mm",  # what inductor fuses before a float8 product, with what stood there
    "GEMM": r"gemm|nvjet|xmma|cublas|splitk|cutlass|::(addmm|mm|bmm|baddbmm|linear|matmul)$|mkldnn_linear|_scaled_mm",
    "activation": r"gelu|erf|tanh|relu",
    "LayerNorm, dropout, residual": r"layer_?norm|dropout|GammaBeta|masked_scale|bernoulli|seed|LayerNorm",
    "embeddings": r"embedding",
    "reductions": r"column_sums|reduce|_red_|::sum$|::mean$|_per_fused_sum|foreach_norm|LpNorm",
    "copies and casts": r"memcpy|memset|copy|catarray|::cat$|::to$|fill|zero_|contiguous",
}
KINDS = (*_PATTERNS, "other")
_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a Chrome trace


class Kernel(NamedTuple):
    """One run of a kernel, times in seconds."""

    name: str
    start: float
    seconds: float


def kind_of(name: str) -> str:
    """One of :data:`KINDS` for the name of a CUDA kernel or, in a profile of the CPU, of an aten operator."""
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(name)), "other")


def kernels_of_trace(trace: dict[str, Any]) -> list[Kernel]:
    """The GPU's kernels, copies and fills in a Chrome trace of torch.profiler, in order of time."""
    found = [e for e in trace["traceEvents"] if e.get("cat") in _ON_GPU]
    return sorted((Kernel(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in found), key=lambda kernel: kernel.start)


def busy(kernels: Sequence[Kernel]) -> tuple[float, float]:
    """Seconds in which at least one kernel ran, and those between the first and the last in which none did.

    Args:
        kernels: In order of their start.
    """
    covered, end = 0.0, kernels[0].start
    for kernel in kernels:
        stop = kernel.start + kernel.seconds
        covered += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    return covered, end - kernels[0].start - covered


def exposed(kernels: Sequence[Kernel]) -> float:
    """Seconds in which communication ran and nothing else did; ``kernels`` in order of their start."""
    others = [kernel for kernel in kernels if kind_of(kernel.name) != "communication"]
    return busy(kernels)[0] - busy(others)[0]


def by_kind(kernels: Iterable[tuple[str, float, int]], steps: int) -> dict[str, dict[str, float]]:
    """Kind → milliseconds and launches a step, from (name, seconds, launches); the slowest kind first."""
    sums: dict[str, list[float]] = {}
    for name, seconds, launches in kernels:
        entry = sums.setdefault(kind_of(name), [0.0, 0.0])
        entry[0] += 1e3 * seconds / steps
        entry[1] += launches / steps
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return {kind: {"ms": ms, "launches": launches} for kind, (ms, launches) in ordered}


def by_name(kernels: Iterable[Kernel]) -> list[tuple[str, float, int]]:
    """(name, seconds, launches) of each kernel, the slowest first."""
    sums: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        seconds, launches = sums.get(kernel.name, (0.0, 0))
        sums[kernel.name] = (seconds + kernel.seconds, launches + 1)
    return sorted(((name, *entry) for name, entry in sums.items()), key=lambda entry: -entry[1])
