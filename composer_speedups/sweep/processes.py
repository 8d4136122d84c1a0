"""Run training programs in child processes, several at a time, and end each with all processes that it started."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from composer_speedups.core.subprocesses import kill_process_group, killed_with_parent, python_module_command

__all__ = ["TRAIN", "Ended", "Job", "Process", "run_all"]

TRAIN = "composer_speedups.train"
"""The module that trains."""

_STOP_SECONDS = 60.0  # for a run that is stopped to finish its batch and write a checkpoint


@dataclass(frozen=True)
class Job:
    """A program to run in a process of its own.

    Attributes:
        arguments: Its command line; that of train.py for a training run.
        log: File to which its output and errors are appended.
        environment: Variables to add to this process's environment.
        program: The module to run.
        ranks: Number of processes that train together, started by Composer's launcher if it is above 1.
    """

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = TRAIN
    ranks: int = 1


class Ended(NamedTuple):
    """How a process ended."""

    status: int | None  # exit status; None if it was killed at its time limit
    output: str  # what it wrote to its log
    seconds: float  # since it was started


class Process:
    """A running job, in a process group of its own. With ``setpriv``, it is killed when the thread that started it
    ends."""

    def __init__(self, job: Job, stdin: IO[bytes] | int = subprocess.DEVNULL) -> None:
        self.job = job
        launcher = ["composer.cli.launcher", "-n", str(job.ranks), "-m"] if job.ranks > 1 else []
        command, environment = python_module_command(*launcher, job.program, *job.arguments)
        with open(job.log, "ab") as output:
            self._offset = output.tell()
            self.began, self.killed = time.perf_counter(), False
            self.popen = subprocess.Popen(
                [*killed_with_parent(), *command],
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **job.environment},
                start_new_session=True,
            )

    def wait(self, timeout: float | None = None) -> Ended:
        """Wait for the end, or kill it after ``timeout`` seconds; kill what is left of its group in either case."""
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.popen.wait(timeout)
        finally:
            seconds = time.perf_counter() - self.began
            self.kill()
        return Ended(status, self.job.log.read_bytes()[self._offset :].decode(errors="replace"), seconds)

    def kill(self) -> None:
        """Kill the process and its children. Later calls do nothing: the ID of the group may belong to others."""
        if not self.killed:
            self.killed = True
            kill_process_group(self.popen)


def run_all(
    jobs: Sequence[Job],
    at_a_time: int,
    done: Callable[[Job, Ended], None],
    start: Callable[[Job], Process] = Process,
) -> None:
    """Run jobs in their order, ``at_a_time`` together, and call ``done`` after each.

    An exception, such as one of a signal handler or of ``done``, stops the running jobs with SIGTERM, upon which those
    with checkpoints write one, and kills them after a minute or at another signal.
    """
    waiting, running = deque(jobs), list[Process]()
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                running.append(start(waiting.popleft()))
            time.sleep(0.02)
            for process in [process for process in running if process.popen.poll() is not None]:
                ended = process.wait()
                running.remove(process)
                done(process.job, ended)
    finally:
        _stop(running)


def _stop(processes: Sequence[Process]) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    try:
        for process in processes:
            process.popen.terminate()
        while any(process.popen.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
