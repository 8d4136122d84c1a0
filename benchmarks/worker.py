"""Run the training processes of a table, each of which imports everything ahead of its run.

Composer's import takes ten seconds and more, so a table takes half as long if several processes import together. Each
process trains once. No process of a group trains before all have imported, because imports would disturb measurements.
To time a whole job, a cold process is used instead, and timed from its start to its end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_speedups.core.subprocesses import kill_process_group, killed_with_parent
from composer_speedups.train.child_process import TRAIN  # the program that trains, unless a peer does

ROOT = Path(__file__).parent.parent
_READY = "ready\n"


class _Process:
    """A Python process in its own process group, which is killed with this process if ``setpriv`` is installed.

    Only a thread that lives until the last run may start one. Those of the pools in benchmarks.run do, because the
    pools are shut down after the workers are closed.

    Args:
        arguments: Arguments of the Python interpreter.
        environment: Variables to add to this process's environment.
        streams: ``stdin``, ``stdout`` and ``stderr`` of :class:`subprocess.Popen`.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], **streams: Any) -> None:
        self._closed = False
        self._process = subprocess.Popen(
            [*killed_with_parent(), sys.executable, *arguments],
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,  # a process group, so that DataLoader workers are killed with it
            **streams,
        )

    def close(self) -> None:
        """Kill the process and its children, even if it has exited; later calls do nothing."""
        if self._closed:  # the ID of the process group may belong to other processes by now
            return
        self._closed = True
        kill_process_group(self._process)
        for stream in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Worker(_Process):
    """A process that imports everything when it starts, and then runs ``train.py`` or a peer once."""

    def __init__(self) -> None:
        super().__init__(["-m", "benchmarks.worker"], {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Wait until the process has imported everything.

        Raises:
            RuntimeError: It exited while it imported.
        """
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            self.close()
            raise RuntimeError(f"a worker exited with status {self._process.wait()} while it imported")

    def run(self, program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Call ``main(arguments)`` of the module ``program``; return the process's exit status and output."""
        assert self._process.stdin is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            request = [program, list(arguments), dict(environment), log.name]
            with contextlib.suppress(BrokenPipeError):  # it exited; its status tells why
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.close()
            return self._process.wait(), log.read()


class ColdRun(_Process):
    """A process that runs a program from its start, imports included.

    With several ``ranks``, it is Composer's launcher, ``composer -n RANKS``, which starts one process per rank.
    """

    def __init__(self, program: str, arguments: Sequence[str], environment: Mapping[str, str], ranks: int = 1) -> None:
        launcher = ["-m", "composer.cli.launcher", "-n", str(ranks)] if ranks > 1 else []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the run
        self._started = time.perf_counter()
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
        super().__init__([*launcher, "-m", program, *arguments], environment, **streams)

    def wait(self) -> tuple[int, str, float]:
        """Wait for the process; return its exit status, its output, and the seconds since its start."""
        status = self._process.wait()
        seconds = time.perf_counter() - self._started
        self._log.seek(0)
        return status, self._log.read(), seconds

    def close(self) -> None:
        super().close()
        self._log.close()


class Workers:
    """Runs programs in processes that have imported everything before. Thread-safe.

    Args:
        ahead: Number of processes that are started, and import, together.
        fresh: Start a cold process for each run instead, and time it from its start to its end. Before the first one,
            an untimed process imports the program, so that its bytecode is there, as after an earlier run.
    """

    def __init__(self, ahead: int = 1, *, fresh: bool = False) -> None:
        self._ahead, self._fresh = ahead, fresh
        self._imported: set[str] = set()
        self._ready: list[Worker] = []
        self._all: list[Worker | ColdRun] = []
        self._lock, self._closed = threading.Lock(), False

    def run(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str], ranks: int = 1
    ) -> tuple[int, str, dict[str, float]]:
        """Run a program in a process of its own; return its exit status, output and duration.

        The duration is ``{"run_seconds": …}`` without imports, or ``{"process_seconds": …}`` with ``fresh``. A run with
        several ``ranks`` always has cold processes, which Composer's launcher starts; without ``fresh``, it is not
        timed.

        Raises:
            RuntimeError: The workers are closed, or one of them exited while it imported.
        """
        if self._fresh or ranks > 1:
            with self._lock:
                self._check_open()
                if self._fresh:
                    environment = {**environment, "PYTHONDONTWRITEBYTECODE": ""}
                    self._import_once(program, environment)
                cold = ColdRun(program, arguments, environment, ranks)
                self._all.append(cold)
            try:
                status, output, seconds = cold.wait()
                return status, output, {"process_seconds": seconds} if self._fresh else {}
            finally:
                cold.close()
        with self._lock:
            self._check_open()
            if not self._ready:
                started = [Worker() for _ in range(self._ahead)]
                self._all += started
                for worker in started:
                    worker.wait_until_ready()
                self._ready = started
            worker = self._ready.pop()
        try:
            began = time.perf_counter()
            status, output = worker.run(program, arguments, environment)
            return status, output, {"run_seconds": time.perf_counter() - began}
        finally:
            worker.close()

    def _import_once(self, program: str, environment: Mapping[str, str]) -> None:
        """Import what the program imports, in another process."""
        for module in {__name__, program} - self._imported:
            code = f"import {module} as module; getattr(module, 'import_all', int)()"
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, check=True)
        self._imported |= {__name__, program}

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the workers are closed")

    def close(self) -> None:
        """Kill all processes, and make later runs raise RuntimeError."""
        self._closed = True
        for worker in [*self._all]:  # without the lock, because the thread that holds it may wait for these processes
            worker.close()
        with self._lock:  # that thread may have started others in the meantime
            for worker in self._all:
                worker.close()


def import_all() -> None:
    """Import everything that training imports later."""
    import composer_speedups.data
    import composer_speedups.tasks.export
    import composer_speedups.tasks.models
    import composer_speedups.train.plot
    import composer_speedups.train.report
    import composer_speedups.train.trainer  # noqa: F401
    from composer_speedups.train import application  # noqa: F401


def _main() -> None:
    ready = os.dup(1)
    os.dup2(2, 1)  # the runner expects nothing else on stdout, and imports may print
    import_all()
    from composer_speedups.train.cli import exit_codes

    os.write(ready, _READY.encode())
    os.close(ready)
    line = sys.stdin.readline()
    if not line:  # the runner has no run for this process
        return
    program, arguments, environment, log_name = json.loads(line)
    log = os.open(log_name, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    with exit_codes():
        importlib.import_module(f"{TRAIN}.application" if program == TRAIN else program).main(arguments)


if __name__ == "__main__":
    _main()
