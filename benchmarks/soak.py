"""python -m benchmarks.soak [-f FILE] [steps=5000] [key=value ...]: a long run that is checked for leaks.

By default a tiny BERT trains on built-in reviews, with two DataLoader workers that restart each epoch, and an
evaluation and a checkpoint every tenth of the run. Host memory (of this process and its children), memory allocated on
the GPU, open files, threads and child processes are read every 1% of the steps. In the first fifth of the run caches
fill and compilers end; afterwards nothing may grow (see :func:`grown`).

Needs Linux. Writes soak.json to the run's folder. Exit status: 0 nothing grew, 1 something did.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes, read_command_line
from composer_speedups.train.startup import StartupClock

QUICKSTART = Path(__file__).parent.parent / "yamls" / "quickstart.yaml"
MIB = 2**20
# Allowed growth in bytes: pages that allocators touch late, records of batches (about 0.5 KB each).
_SLACK = {"host_bytes": 32 * MIB, "gpu_bytes": 1 * MIB}
_SETTINGS = "run_name=soak data.workers=2 trainer.progress_bar=false baseline=null plot=false checkpoint.keep=2".split()


class Reading(NamedTuple):
    """The resources of the process and its children after ``batch`` batches."""

    batch: int
    host_bytes: int
    gpu_bytes: int
    open_files: int
    threads: int
    children: int


class Watch(Callback):
    """Reads the resources every ``every`` batches."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.readings: list[Reading] = []
        self._process = psutil.Process()

    def batch_start(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        if batch == 0 or batch % self.every:
            return
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # of glibc; otherwise its free memory varies by 100 MiB and more
        children = self._process.children(recursive=True)
        gpu_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        counts = (self._process.num_fds(), self._process.num_threads(), len(children))
        memory = sum(host_bytes(process.pid) for process in (self._process, *children))
        self.readings.append(Reading(batch, memory, gpu_bytes, *counts))


def host_bytes(pid: int) -> int:
    """A process's anonymous and shared-memory pages, each divided by its number of sharers; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def grown(readings: Sequence[Reading]) -> dict[str, tuple[float, float]]:
    """Resources whose median is larger in the last fifth of the run than in the second: (before, after) by name."""
    fifth, found = max(1, len(readings) // 5), {}
    for place, name in enumerate(Reading._fields[1:], start=1):
        values = [reading[place] for reading in readings]
        early, late = statistics.median(values[fifth : 2 * fifth]), statistics.median(values[-fifth:])
        if late > early + _SLACK.get(name, 0):
            found[name] = (early, late)
    return found


def soak(arguments: Sequence[str]) -> dict[str, Any]:
    """Train and read; return the contents of soak.json."""
    steps = next((int(a.partition("=")[2]) for a in arguments if a.startswith("steps=")), 5000)
    overrides = [a for a in arguments if not a.startswith("steps=")]
    file = [] if {"-f", "--file"} & set(overrides) else ["-f", str(QUICKSTART)]
    every = f"{max(1, steps // 10)}ba"
    length = [f"trainer.max_duration={steps}ba", f"trainer.eval_interval={every}", f"checkpoint.interval={every}"]
    config = read_command_line([*file, *_SETTINGS, *length, *overrides])
    watch = Watch(max(1, steps // 100))
    application.train(config, StartupClock(), callbacks=[watch])
    readings = [reading._asdict() for reading in watch.readings]
    results = {"steps": steps, "grown": grown(watch.readings), "readings": readings}
    path = Path(config.runs_folder) / config.run_name / "soak.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    return results


def main(arguments: Sequence[str]) -> None:
    results = soak(arguments)
    print(json.dumps({name: results["readings"][-1][name] for name in Reading._fields}))
    for name, (early, late) in results["grown"].items():
        print(f"{name} grew from {early:,.0f} to {late:,.0f}")
    raise SystemExit(1 if results["grown"] else 0)


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])
