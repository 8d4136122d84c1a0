"""python -m benchmarks.profile -f FILE [key=value ...] [profile.NAME=N ...]: where a training step spends its time.

Trains like train.py, without evaluations: first ``profile.warmup`` batches (default 12), in which torch.compile
compiles, then ``profile.timed`` (20) that are timed as a whole, then ``profile.active`` (5) under torch.profiler.
Prints Markdown, and appends a row to benchmarks/results/<gpu>/profile.jsonl:

- ``step_ms``: of the timed batches, including waiting for data.
- ``kinds``: milliseconds and launches per step by kind of kernel; ``kernels``: the slowest by name.
- ``busy_ms`` and ``idle_ms``: a step's time with and without a kernel on the GPU, in the profiled batches.
- ``exposed_ms``: time in which only communication ran, including waiting for slower ranks.
- ``gemm_floor_ms``: the duration of only the matrix products of the encoder's Linears on the batch's real tokens,
  forward and backward, in bf16; a last layer that computes only first tokens is counted as such. ``step_over_floor`` is
  ``step_ms`` divided by it.

With several ranks (``composer -n 2 -m benchmarks.profile …``), rank 0 reports its GPU.

Without a GPU, the kinds are those of aten operators by their self time, and the floor is in float32.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from pydantic import Field
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.kernel_kinds import kind_of
from benchmarks.micro import gemm_floor, linear_products
from benchmarks.rows import RESULTS, Row, append_row, call_time
from benchmarks.tables import table
from composer_speedups.callbacks.run_report import evidence_of
from composer_speedups.core.command_line import read_settings
from composer_speedups.core.engaging import check
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.settings import Settings
from composer_speedups.core.trainer_state import device_of, torch_device
from composer_speedups.families.flops import batch_lengths
from composer_speedups.packing.layout import MULTIPLE, round_up
from composer_speedups.train.cli import exit_codes, read_command_line
from composer_speedups.train.environment import environment
from composer_speedups.train.run_folder import RunFolder
from composer_speedups.train.trainer import build_data_and_model, build_trainer, join_ranks, open_device, run_of

_PREFIX = "profile."
_KEPT = 40  # number of kernels in a row
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories in a Chrome trace


class Kernel(NamedTuple):
    """One execution of a kernel; times are in seconds."""

    name: str
    start: float
    seconds: float


def kernels_of_trace(trace: dict[str, Any]) -> list[Kernel]:
    """The GPU's kernels, copies and fills in a Chrome trace of torch.profiler, sorted by time."""
    events = [e for e in trace["traceEvents"] if e.get("cat") in _ON_GPU]
    kernels = (Kernel(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events)
    return sorted(kernels, key=lambda kernel: kernel.start)


def busy(kernels: Sequence[Kernel]) -> tuple[float, float]:
    """Seconds with at least one running kernel, and without any; ``kernels`` must be sorted by start."""
    covered, end = 0.0, kernels[0].start
    for kernel in kernels:
        stop = kernel.start + kernel.seconds
        covered += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    return covered, end - kernels[0].start - covered


def exposed(kernels: Sequence[Kernel]) -> float:
    """Seconds in which only communication ran; ``kernels`` must be sorted by start."""
    others = [kernel for kernel in kernels if kind_of(kernel.name) != "communication"]
    return busy(kernels)[0] - busy(others)[0]


def by_kind(kernels: Iterable[tuple[str, float, int]], steps: int) -> dict[str, dict[str, float]]:
    """Kind → milliseconds and launches per step, from (name, seconds, launches); the slowest kind first."""
    sums: dict[str, dict[str, float]] = {}
    for name, seconds, launches in kernels:
        entry = sums.setdefault(kind_of(name), {"ms": 0.0, "launches": 0.0})
        entry["ms"] += 1e3 * seconds / steps
        entry["launches"] += launches / steps
    return dict(sorted(sums.items(), key=lambda item: -item[1]["ms"]))


def by_name(kernels: Iterable[Kernel]) -> list[tuple[str, float, int]]:
    """(name, seconds, launches) of each kernel, the slowest first."""
    times: dict[str, list[float]] = {}
    for kernel in kernels:
        times.setdefault(kernel.name, []).append(kernel.seconds)
    return sorted(((name, sum(seconds), len(seconds)) for name, seconds in times.items()), key=lambda entry: -entry[1])


class Counts(Settings):
    """Number of batches per phase; the profiler needs two more to warm up."""

    warmup: int = Field(12, ge=1)
    timed: int = Field(20, ge=1)
    active: int = Field(5, ge=1)

    @property
    def batches(self) -> int:
        return self.warmup + self.timed + 2 + self.active


class StepProfiler(Callback):
    """Times some steady batches as a whole, then profiles some.

    It handles only the events it needs, because under DDP a callback that might read gradients delays the optimizer
    step.
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.step_seconds = 0.0
        self.tokens: list[int] = []
        self.kernels: list[tuple[str, float, int]] = []  # name, seconds, launches, the slowest first
        self.busy: tuple[float | None, float | None] = (None, None)  # seconds with and without a kernel on the GPU
        self.exposed: float | None = None
        self._started = 0.0
        self._profile: profile | None = None

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if (lengths := batch_lengths(state.batch)) is not None:
            self.tokens.append(int(lengths.sum()))

    def batch_end(self, state: State, logger: Logger) -> None:
        counts, trained, device = self.counts, state.timestamp.batch.value, device_of(state)
        on_gpu = device.type == "cuda"
        if trained in (counts.warmup, counts.warmup + counts.timed):
            if on_gpu:
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            self.step_seconds, self._started = (now - self._started) / counts.timed, now
        if self._profile is not None:
            if on_gpu and trained == counts.batches:
                torch.cuda.synchronize(device)
            self._profile.step()
        if trained == counts.warmup + counts.timed:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            self._profile = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=2, active=counts.active, repeat=1),
                on_trace_ready=self._read_gpu if on_gpu else self._read_cpu,
                acc_events=True,  # a single cycle; without this torch warns about further ones
            )
            self._profile.start()
        if trained == counts.batches and self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _read_gpu(self, recorded: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            kernels = kernels_of_trace(json.loads(path.read_text()))
        self.kernels, self.busy, self.exposed = by_name(kernels), busy(kernels), exposed(kernels)

    def _read_cpu(self, recorded: profile) -> None:
        every = [(e.key, e.self_cpu_time_total / 1e6, e.count) for e in recorded.key_averages()]
        operators = [entry for entry in every if not entry[0].startswith(("ProfilerStep", "Optimizer."))]
        self.kernels = sorted(operators, key=lambda entry: -entry[1])


def main(arguments: list[str], results: Path = RESULTS) -> Row:
    counts, rest = read_settings(Counts, arguments, _PREFIX)
    config = read_command_line(rest)
    config.trainer.max_duration = f"{counts.batches}ba"
    config.callbacks.throughput = config.callbacks.memory = None
    techniques = build_techniques(config.algorithms, config.on_unavailable)
    device = open_device(config.trainer)
    check(techniques, run_of(config.trainer, device))
    where = torch_device(device)
    join_ranks(config.trainer, device)
    with RunFolder(config) as folder:
        data, model = build_data_and_model(config, on_gpu=where.type == "cuda")
        trainer = build_trainer(config, model, data._replace(eval=None), techniques, device, folder)
        profiler = StepProfiler(counts)
        trainer.state.callbacks.append(profiler)
        trainer.fit()
        engaged = evidence_of(trainer.state)
        row = _row(rest, profiler, model, engaged, config.data.batch_size, where)
        trainer.close()
    if dist.get_global_rank() == 0:
        append_row(row, "profile", results)
        print("\n".join(markdown(row)))
    return row


def _row(
    arguments: list[str],
    profiler: StepProfiler,
    model: torch.nn.Module,
    engaged: dict[str, Any],
    batch_size: int,
    device: torch.device,
) -> Row:
    tokens = round(sum(profiler.tokens) / len(profiler.tokens))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ran = str(engaged.get("fused_layers", {}).get("evidence", {}).get("layers_ran", ""))
    first_tokens = batch_size // dist.get_world_size() if "first tokens" in ran else None
    products = linear_products(model, round_up(tokens, MULTIPLE), first_tokens)
    floor = gemm_floor(products, device, dtype)
    steps = profiler.counts.active
    step_ms, floor_ms = 1e3 * profiler.step_seconds, 1e3 * floor
    busy_ms, idle_ms, exposed_ms = (None if s is None else 1e3 * s / steps for s in (*profiler.busy, profiler.exposed))
    kernels = [
        {"name": name, "kind": kind_of(name), "ms": 1e3 * seconds / steps, "launches": launches / steps}
        for name, seconds, launches in profiler.kernels[:_KEPT]
    ]
    return {
        "table": "profile",
        "call": call_time(),
        "arguments": arguments,
        "step_ms": step_ms,
        "busy_ms": busy_ms,
        "idle_ms": idle_ms,
        "exposed_ms": exposed_ms,
        "ranks": dist.get_world_size(),
        "kinds": by_kind(profiler.kernels, steps),
        "kernels": kernels,
        "tokens": tokens,
        "gemm_floor_ms": floor_ms,
        "gemm_floor_dtype": str(dtype).removeprefix("torch."),
        "step_over_floor": step_ms / floor_ms,
        "environment": environment(),
        "algorithms": engaged,
    }


def markdown(row: Row) -> list[str]:
    """Format a row as a table by kind, and a table of its slowest kernels."""
    total = sum(kind["ms"] for kind in row["kinds"].values())
    kinds = [
        [kind, f"{entry['ms']:.2f}", f"{entry['ms'] / total:.0%}", f"{entry['launches']:,.0f}"]
        for kind, entry in row["kinds"].items()
    ]
    waits = {"no kernel": row["idle_ms"], "communication alone": row["exposed_ms"] if row["ranks"] > 1 else None}
    kernels = [
        [kernel["name"][:90].replace("|", "/"), kernel["kind"], f"{kernel['ms']:.3f}", f"{kernel['launches']:,.0f}"]
        for kernel in row["kernels"][:20]
    ]
    return [
        *table(["kind", "ms a step", "share", "launches"], kinds),
        *(f"| {name} | {ms:.2f} | | |" for name, ms in waits.items() if ms is not None),
        "",
        f"Step {row['step_ms']:.2f} ms, {row['step_over_floor']:.2f} times the {row['gemm_floor_ms']:.2f} ms of its "
        f"matrix products alone ({row['gemm_floor_dtype']}, {row['tokens']:,} real tokens).",
        "",
        *table(["kernel", "kind", "ms a step", "launches"], kernels),
    ]


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
