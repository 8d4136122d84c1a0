"""python -m benchmarks.profile -f FILE [key=value ...] [profile.NAME=N ...]: where a training step spends its time.

Trains like train.py: first ``profile.warmup`` batches (default 12), in which torch.compile compiles, then
``profile.timed`` (20) that are timed as a whole, then ``profile.active`` (5) under torch.profiler. Prints Markdown, and
appends a row to benchmarks/results/<gpu>/profile.jsonl:

- ``step_ms``: of the timed batches, including waiting for data.
- ``kernels``: the slowest by name, with milliseconds and launches per step.
- ``busy_ms``: a step's time with a kernel on the GPU, in the profiled batches.
- ``gemm_floor_ms``: the duration of only the matrix products of the encoder's Linears on the batch's real tokens,
  forward and backward, in bf16; a last layer that computes only first tokens is counted as such. ``step_over_floor`` is
  ``step_ms`` divided by it.

Without a GPU, the kernels are aten operators with their self time, and the floor is in float32.
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
from pydantic import Field
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.micro import gemm_floor, linear_products
from benchmarks.rows import RESULTS, Row, append_row, call_time
from benchmarks.tables import kinds_of_kernels, table
from composer_speedups.core.command_line import read_settings
from composer_speedups.core.settings import Settings
from composer_speedups.core.trainer_state import device_of
from composer_speedups.families.flops import batch_lengths
from composer_speedups.packing.layout import MULTIPLE, round_up
from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes, read_command_line
from composer_speedups.train.startup import StartupClock

_SETTINGS = (
    "callbacks.throughput=null callbacks.memory=null trainer.eval_interval=null trainer.eval_batches=1 baseline=null "
    "export=false plot=false"
).split()
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


def busy(kernels: Sequence[Kernel]) -> float:
    """Seconds with at least one running kernel; ``kernels`` must be sorted by start."""
    covered, end = 0.0, 0.0
    for kernel in kernels:
        stop = kernel.start + kernel.seconds
        covered += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    return covered


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
    """Times some steady batches as a whole, then profiles some; it hears no event in which DDP would wait for it."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.step_seconds = 0.0
        self.tokens: list[int] = []
        self.kernels: list[tuple[str, float, int]] = []  # name, seconds, launches, the slowest first
        self.busy = 0.0  # seconds with a kernel on the GPU
        self.model: Any = None
        self._started = 0.0
        self._profile: profile | None = None

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if (lengths := batch_lengths(state.batch)) is not None:
            self.tokens.append(int(lengths.sum()))

    def batch_end(self, state: State, logger: Logger) -> None:
        counts, trained, on_gpu = self.counts, state.timestamp.batch.value, device_of(state).type == "cuda"
        timed = counts.warmup + counts.timed
        if on_gpu and trained in (counts.warmup, timed, counts.batches):
            torch.cuda.synchronize()
        if trained in (counts.warmup, timed):
            now = time.perf_counter()
            self.step_seconds, self._started = (now - self._started) / counts.timed, now
        if self._profile is not None:
            self._profile.step()
        if trained == timed:
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
            self._profile, self.model = None, state.model

    def _read_gpu(self, recorded: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            kernels = kernels_of_trace(json.loads(path.read_text()))
        self.kernels, self.busy = by_name(kernels), busy(kernels)

    def _read_cpu(self, recorded: profile) -> None:
        every = [(e.key, e.self_cpu_time_total / 1e6, e.count) for e in recorded.key_averages()]
        operators = [entry for entry in every if not entry[0].startswith(("ProfilerStep", "Optimizer."))]
        self.kernels = sorted(operators, key=lambda entry: -entry[1])
        self.busy = sum(seconds for _, seconds, _ in operators)


def main(arguments: list[str], results: Path = RESULTS) -> Row:
    counts, rest = read_settings(Counts, arguments, "profile.")
    config = read_command_line([*rest, *_SETTINGS, f"trainer.max_duration={counts.batches}ba"])
    profiler = StepProfiler(counts)
    application.train(config, StartupClock(), callbacks=[profiler])
    report = json.loads((Path(config.runs_folder) / config.run_name / "report.json").read_text())
    assert config.data.batch_size is not None, "give data.batch_size"
    row = _row(rest, profiler, report, config.data.batch_size)
    append_row(row, "profile", results)
    print("\n".join(markdown(row)))
    return row


def _row(arguments: list[str], profiler: StepProfiler, report: Row, batch_size: int) -> Row:
    device = next(profiler.model.parameters()).device
    tokens = round(sum(profiler.tokens) / len(profiler.tokens))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ran = str(report["algorithms"].get("fused_layers", {}).get("evidence", {}).get("layers_ran", ""))
    first_tokens = batch_size if "first tokens" in ran else None
    products = linear_products(profiler.model, round_up(tokens, MULTIPLE), first_tokens)
    step_ms, floor_ms = 1e3 * profiler.step_seconds, 1e3 * gemm_floor(products, device, dtype)
    steps = profiler.counts.active
    kernels = [
        {"name": name, "ms": 1e3 * seconds / steps, "launches": launches / steps}
        for name, seconds, launches in profiler.kernels[:_KEPT]
    ]
    return {
        "table": "profile",
        "call": call_time(),
        "arguments": arguments,
        "step_ms": step_ms,
        "busy_ms": 1e3 * profiler.busy / steps,
        "kernels": kernels,
        "tokens": tokens,
        "gemm_floor_ms": floor_ms,
        "gemm_floor_dtype": str(dtype).removeprefix("torch."),
        "step_over_floor": step_ms / floor_ms,
        "environment": report["environment"],
        "algorithms": report["algorithms"],
    }


def markdown(row: Row) -> list[str]:
    """A table by kind, and one of the slowest kernels."""
    kernels = [
        [kernel["name"][:90].replace("|", "/"), f"{kernel['ms']:.3f}", f"{kernel['launches']:,.0f}"]
        for kernel in row["kernels"][:20]
    ]
    return [*kinds_of_kernels({"this run": row}), "", *table(["kernel", "ms per step", "launches"], kernels)]


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
