"""python -m benchmarks.soak [-f FILE] [steps=5000] [key=value ...]: a long run that is checked for leaks.

By default a tiny BERT trains on built-in reviews, with two DataLoader workers that restart each epoch, and an
evaluation and a checkpoint every 500 steps. Host memory (of this process and its children), memory allocated on the
GPU, open files, threads, child processes and the loader's waiting workers are read every 1% of the steps. In the first
fifth of the run caches fill and compilers end. Afterwards nothing may grow; see :func:`grown`. The rate of the last
fifth relative to that of the second is printed too, but is meaningful only on an otherwise idle machine.

Needs Linux. Writes runs/soak/soak.json. Exit status: 0 nothing grew, 1 something did.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes, read_command_line
from composer_speedups.train.startup import StartupClock, without_gc

ROOT = Path(__file__).parent.parent
MIB = 2**20
_READINGS = 100
# Allowed growth in bytes: pages that allocators touch late, records of batches (about 0.5 KB each).
_SLACK = {"host_bytes": 32 * MIB, "gpu_bytes": 1 * MIB}
_SETTINGS = "run_name=soak data.workers=2 trainer.progress_bar=false baseline=null plot=false checkpoint.keep=2".split()


class Reading(NamedTuple):
    """The resources of the process after ``batch`` batches, ``seconds`` after the first reading."""

    batch: int
    seconds: float
    host_bytes: int
    gpu_bytes: int
    open_files: int
    threads: int
    children: int


class Watch(Callback):
    """Reads the process's resources every ``every`` batches, outside evaluations and checkpoints."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.readings: list[Reading] = []
        self._process = psutil.Process()
        self._away = self._since = 0.0  # seconds of evaluations and checkpoints

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._since = time.perf_counter()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self._away += time.perf_counter() - self._since

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every == 0 and state.timestamp.batch.value > 0:
            self.readings.append(self._read(state.timestamp.batch.value))

    def _read(self, batch: int) -> Reading:
        gc.collect()
        # of glibc; otherwise its free memory varies by 100 MiB and more
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        children = self._process.children(recursive=True)
        memory = 0
        for process in (self._process, *children):
            try:
                memory += host_bytes(process.pid)
            except (FileNotFoundError, ProcessLookupError):  # a worker that has ended meanwhile
                continue
        return Reading(
            batch,
            time.perf_counter() - self._away,
            memory,
            torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
            self._process.num_fds(),
            self._process.num_threads(),
            len(children),
        )


def host_bytes(pid: int) -> int:
    """A process's own memory: anonymous and shared-memory pages, each divided by the number of processes that share it.

    File pages are not counted, because libraries are shared with other processes on the machine.

    Source: the kernel's documentation of /proc/PID/smaps_rollup.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def grown(readings: Sequence[Reading]) -> dict[str, tuple[float, float]]:
    """Resources whose median is larger in the last fifth of the run than in the second: (before, after) by name.

    Medians are used because a reading may coincide with the restart of workers at an epoch's end. Counts may not grow
    at all, bytes by the slack that allocators need.
    """
    fifth = max(1, len(readings) // 5)
    early, late = readings[fifth : 2 * fifth], readings[-fifth:]
    found = {}
    for name in Reading._fields[2:]:
        before, after = (statistics.median(getattr(r, name) for r in part) for part in (early, late))
        if after > before + _SLACK.get(name, 0):
            found[name] = (before, after)
    return found


def rate_ratio(readings: Sequence[Reading]) -> float:
    """Batches per second of the last fifth divided by those of the second, without evaluations and with checkpoints."""
    fifth = max(2, len(readings) // 5)
    early, late = readings[fifth - 1 : 2 * fifth], readings[-fifth:]
    rates = [(part[-1].batch - part[0].batch) / (part[-1].seconds - part[0].seconds) for part in (early, late)]
    return rates[1] / rates[0]


def soak(arguments: Sequence[str]) -> dict[str, Any]:
    """Train and read; return the contents of soak.json."""
    steps = next((int(a.partition("=")[2]) for a in arguments if a.startswith("steps=")), 5000)
    overrides = [a for a in arguments if not a.startswith("steps=")]
    given = [] if {"-f", "--file"} & set(overrides) else ["-f", str(ROOT / "yamls" / "quickstart.yaml")]
    every = f"{max(1, steps // 10)}ba"
    length = [f"trainer.max_duration={steps}ba", f"trainer.eval_interval={every}", f"checkpoint.interval={every}"]
    config, origins = read_command_line([*given, *_SETTINGS, *length, *overrides])
    watch = Watch(max(1, steps // _READINGS))
    with without_gc():
        clock = StartupClock()
    application.train(config, origins, clock, callbacks=[watch])
    found = {
        "steps": steps,
        "grown": grown(watch.readings),
        "rate_ratio": rate_ratio(watch.readings),
        "readings": [r._asdict() for r in watch.readings],
    }
    path = Path(config.runs_folder) / config.run_name / "soak.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    return found


def main(arguments: Sequence[str]) -> None:
    if set(arguments) & {"-h", "--help"}:
        print(__doc__)
        return
    found = soak(arguments)
    first, last = found["readings"][len(found["readings"]) // 5], found["readings"][-1]
    for name in Reading._fields[2:]:
        unit = MIB if name.endswith("bytes") else 1
        print(f"  {name:<12} {first[name] / unit:10,.1f} after a fifth, {last[name] / unit:10,.1f} at the end")
    print(f"  rate of the last fifth over the second: {found['rate_ratio']:.3f}")
    if found["grown"]:
        print(f"grew: {', '.join(found['grown'])}")
        raise SystemExit(1)
    print("nothing grew")


if __name__ == "__main__":
    with exit_codes("benchmarks.soak"):
        main(sys.argv[1:])
