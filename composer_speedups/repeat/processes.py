"""Train runs in child processes, spread over the visible GPUs."""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from composer_speedups.core.files import LockedFileError, lock_file
from composer_speedups.core.subprocesses import command_output, kill_process_group
from composer_speedups.repeat.runs import Run
from composer_speedups.train.child_process import start_training
from composer_speedups.train.failed_process import failure_reason

__all__ = ["gpus_of_processes", "train_all"]


class _Job(NamedTuple):
    run: Run
    gpu: str | None
    process: subprocess.Popen[bytes]
    offset: int  # size of the log when the process started
    lock: io.FileIO


def gpus_of_processes(runs: Sequence[Run], processes: int | None) -> list[str | None]:
    """The GPU of each process that trains at the same time, found without importing torch; None if there is none."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if all(run.config.trainer.device == "cpu" for run in runs):
        names = ""
    elif names is None:
        uuids = command_output("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", timeout=60)
        names = (uuids or "").replace("\n", ",")
    listed = [name.strip() for name in names.split(",") if name.strip()]
    named = listed[: listed.index("-1")] if "-1" in listed else listed  # CUDA ignores what follows -1
    gpus: list[str | None] = [*named] or [None]
    return [gpus[i % len(gpus)] for i in range(processes or len(gpus))]


def train_all(runs: Sequence[Run], gpus: Sequence[str | None], program: str) -> list[str]:
    """Train the runs that have not finished, one at a time for each of ``gpus``, and return a line for each that fails.

    Each run is locked while it is trained. Another command with the same runs waits for them, or trains the others.
    An exception, such as one of a signal handler, stops the running ones; those with checkpoints write one.
    """
    waiting, free = [run for run in runs if run.metrics() is None], [*gpus]
    print(f"{len(waiting)} of {len(runs)} runs are not finished; training {len(free)} at a time", flush=True)
    for run in waiting:
        if changed := run.changed():
            print(f"{run.folder.name}: trained again, since {changed} has changed", flush=True)
    elsewhere = set[str]()
    jobs, failures = list[_Job](), list[str]()
    try:
        while waiting or jobs:
            for run in [*waiting] if free else ():
                try:
                    lock = lock_file(run.folder.with_name(f".{run.folder.name}.repeat.lock"), "runs_folder")
                except LockedFileError:
                    if run.folder.name not in elsewhere:
                        elsewhere.add(run.folder.name)
                        print(f"{run.folder.name}: another command is training it", flush=True)
                    continue
                waiting.remove(run)
                if run.metrics() is not None:  # another command has trained it meanwhile
                    lock.close()
                    continue
                gpu = free.pop(0)
                visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
                with open(f"{run.folder}.log", "ab") as output:  # train.py may rename the folder itself
                    offset = output.tell()
                    process = start_training(run.arguments, output, visible, program)
                    jobs.append(_Job(run, gpu, process, offset, lock))
                print(f"{run.folder.name}: started{f' on GPU {gpu}' if gpu else ''}", flush=True)
                if not free:
                    break
            time.sleep(0.2)
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                free.append(job.gpu)
                kill_process_group(job.process)  # what is left of it
                job.lock.close()
                if status := job.process.returncode:
                    text = Path(f"{job.run.folder}.log").read_bytes()[job.offset :].decode(errors="replace")
                    failures.append(f"{job.run.folder.name}: {failure_reason(status, text)}")
                elif changed := job.run.changed():
                    failures.append(f"{job.run.folder.name}: {changed} changed while the command ran; start again")
                    status = 1
                print(failures[-1] if status else f"{job.run.folder.name}: finished", flush=True)
    finally:
        _stop([job.process for job in jobs])
    return failures


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop processes with SIGTERM, and kill those that do not end in time or when another signal arrives."""
    if processes:
        print(f"stopping {len(processes)} runs; the same command continues", flush=True)
    deadline = time.monotonic() + 60  # enough to finish a batch and write a checkpoint
    try:
        for process in processes:
            process.terminate()
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in processes:
            kill_process_group(process)
