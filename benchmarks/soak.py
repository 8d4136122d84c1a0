"""python -m benchmarks.soak [-f FILE] [steps=5000] [key=value ...]: a long run that is checked for leaks.

By default a tiny BERT trains on built-in reviews, with two DataLoader workers that restart each epoch, and an
evaluation and a checkpoint every tenth of the run. Host memory (of this process and its children), memory allocated on
the GPU, open files, threads and child processes are read every 1% of the steps. In the first fifth of the run caches
fill and compilers end; afterwards nothing may grow (see :func:`grown`).

Needs Linux. Writes soak.json to the run's folder. Exit status: 0 nothing grew, 1 something did.
"""

from __future__ import annotations

import contextlib
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
from composer_speedups.train.startup import StartupClock, without_gc

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
        # of glibc; otherwise its free memory varies by 100 MiB and more
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        children = self._process.children(recursive=True)
        gpu_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        counts = (self._process.num_fds(), self._process.num_threads(), len(children))
        memory = sum(host_bytes(process.pid) for process in (self._process, *children))
        self.readings.append(Reading(batch, memory, gpu_bytes, *counts))


def host_bytes(pid: int) -> int:
    """A process's own memory: anonymous and shared-memory pages, each divided by the number of processes that share it.

    File pages are not counted, because libraries are shared with other processes on the machine. 0 for a process that
    has ended. Source: the kernel's documentation of /proc/PID/smaps_rollup.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def grown(readings: Sequence[Reading]) -> dict[str, tuple[float, float]]:
    """Resources whose median is larger in the last fifth of the run than in the second: (before, after) by name.

    Medians are used because a reading may coincide with the restart of workers at an epoch's end. Counts may not grow
    at all, bytes by the slack that allocators need.
    """
    fifth = max(1, len(readings) // 5)
    medians = {
        name: tuple(statistics.median(getattr(reading, name) for reading in part) for part in (early, late))
        for name in Reading._fields[1:]
        for early, late in [(readings[fifth : 2 * fifth], readings[-fifth:])]
    }
    return {name: (old, new) for name, (old, new) in medians.items() if new > old + _SLACK.get(name, 0)}


def soak(arguments: Sequence[str]) -> dict[str, Any]:
    """Train and read; return the contents of soak.json."""
    steps = next((int(a.partition("=")[2]) for a in arguments if a.startswith("steps=")), 5000)
    overrides = [a for a in arguments if not a.startswith("steps=")]
    file = [] if {"-f", "--file"} & set(overrides) else ["-f", str(QUICKSTART)]
    every = f"{max(1, steps // 10)}ba"
    length = [f"trainer.max_duration={steps}ba", f"trainer.eval_interval={every}", f"checkpoint.interval={every}"]
    config = read_command_line([*file, *_SETTINGS, *length, *overrides])
    watch = Watch(max(1, steps // 100))
    with without_gc():
        clock = StartupClock()
    application.train(config, clock, callbacks=[watch])
    results = {
        "steps": steps,
        "grown": grown(watch.readings),
        "readings": [reading._asdict() for reading in watch.readings],
    }
    path = Path(config.runs_folder) / config.run_name / "soak.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    return results


def main(arguments: Sequence[str]) -> None:
    if set(arguments) & {"-h", "--help"}:
        print(__doc__)
        return
    results = soak(arguments)
    first, last = results["readings"][len(results["readings"]) // 5], results["readings"][-1]
    for name in Reading._fields[1:]:
        unit = MIB if name.endswith("bytes") else 1
        print(f"  {name:<12} {first[name] / unit:10,.1f} after a fifth, {last[name] / unit:10,.1f} at the end")
    print(f"grew: {', '.join(results['grown'])}" if results["grown"] else "nothing grew")
    raise SystemExit(1 if results["grown"] else 0)


if __name__ == "__main__":
    with exit_codes("benchmarks.soak"):
        main(sys.argv[1:])
