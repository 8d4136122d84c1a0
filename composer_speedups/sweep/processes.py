"""Run training programs in child processes, several at a time, and end each with all processes that it started."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from composer_speedups.core.processes import kill_process_group, killed_with_parent, python_module_command
from composer_speedups.sweep.forks import Fork, start_server

TRAIN = "composer_speedups.train"
"""The module that trains."""

_STOP_SECONDS = 60.0  # for a run that is stopped to finish its batch and write a checkpoint
_MAX_MESSAGE = 300  # characters of a failed process's message
_KILLED_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL)  # sent by the kernel's out-of-memory killer
_CAUSE = re.compile(r"([A-Za-z_][\w.]*(Error|Exception)|Fatal Python error): ")
_OUT_OF_MEMORY = (
    "out of memory",  # train.py's own line, and those of torch and CUDA
    "outofmemoryerror",  # torch's class, in a traceback
    "cublas_status_alloc_failed",
)


@dataclass(frozen=True)
class Job:
    """A program to run in a process of its own."""

    arguments: Sequence[str]  # its command line; that of train.py for a training run
    log: Path  # to which its output and errors are appended
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's; read after the imports
    program: str = TRAIN  # the module to run
    ranks: int = 1  # processes that train together, started by Composer's launcher if there are several
    # Whether it does its own imports, as jobs of several ranks do. Others are forked with everything imported.
    cold: bool = False


class Ended(NamedTuple):
    """How a process ended."""

    status: int | None  # exit status; None if it was killed at its time limit
    output: str  # what it wrote to its log
    seconds: float  # since it was started

    @property
    def kind(self) -> Literal["ok", "out of memory", "time", "refused", "failed"]:
        """What went wrong; a process that another one killed counts as out of memory, for which the kernel kills."""
        output = self.output.lower()
        if not self.status:
            return "time" if self.status is None else "ok"
        if self.status in _KILLED_STATUSES or any(sign in output for sign in _OUT_OF_MEMORY):
            return "out of memory"
        return "refused" if self.status == 2 else "failed"

    @property
    def reason(self) -> str:
        """Why a training process failed, in one line; empty if it did not."""
        if self.kind in ("ok", "time"):
            return "" if self.kind == "ok" else "it was killed at its time limit"
        reason = own_line(self.output)[:_MAX_MESSAGE] or f"it ended with status {self.status}"
        return f"ran out of memory ({reason})" if self.kind == "out of memory" else reason


def own_line(output: str) -> str:
    """train.py's own error lines without their prefix, or else the last that names an exception, or the last of all."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line.partition("train.py: ")[2] for line in lines if "train.py: " in line]
    causes = [line for line in lines if _CAUSE.match(line)]  # torch prints advice below its exceptions
    return " | ".join(dict.fromkeys(own)) or (causes or lines or [""])[-1]


class Process:
    """A running job, in a process group of its own; with ``setpriv``, it is killed with this process."""

    def __init__(self, job: Job) -> None:
        self.job, self.killed = job, False
        launcher = ["composer.cli.launcher", "-n", str(job.ranks), "-m"] if job.ranks > 1 else []
        command, environment = python_module_command(*launcher, job.program, *job.arguments)
        environment |= job.environment
        with open(job.log, "ab") as output:
            self._offset = output.tell()
            forked = job.ranks == 1 and not job.cold
            if forked:
                start_server()  # its imports are no part of the job
            self.began = time.perf_counter()
            self.popen: Fork | subprocess.Popen[bytes] = (
                Fork(command, environment, output)
                if forked
                else subprocess.Popen(
                    [*killed_with_parent(), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
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
    jobs: Iterable[Job], at_a_time: int, done: Callable[[Job, Ended], None], start: Callable[[Job], Process] = Process
) -> None:
    """Run jobs in their order, ``at_a_time`` together, each asked for when it can start, and call ``done`` after each;
    an exception stops them."""
    waiting, running = iter(jobs), list[Process]()
    try:
        while True:
            for job in itertools.islice(waiting, at_a_time - len(running)):
                running.append(start(job))
            if not running:
                return
            time.sleep(0.02)
            for process in [process for process in running if process.popen.poll() is not None]:
                ended = process.wait()
                running.remove(process)
                done(process.job, ended)
    finally:
        _stop(running)


def _stop(processes: Sequence[Process]) -> None:
    if processes:
        print(f"stopping {len(processes)} runs", flush=True)
    deadline = time.monotonic() + _STOP_SECONDS
    try:
        for process in processes:
            process.popen.terminate()
        while any(process.popen.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
