"""Training processes that import everything before their turn, which halves the duration of a table.

Several start together, import (Composer's import takes ten seconds and more) and wait. None of them runs while others
of the same group still import, which would disturb measurements. Each process trains once. To time a whole job, cold
processes are used instead, from their start to their end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TRAIN = "composer_speedups.train"  # the module that trains, unless it is a peer
_READY = "ready\n"
_SETPRIV = shutil.which("setpriv")
# A child ends with a killed runner. The kernel sends the signal when the thread that started the child ends: here the
# main thread or one of a pool, and a pool's threads end after its last run.
_WITH_RUNNER = [_SETPRIV, "--pdeathsig", "KILL", "--"] if _SETPRIV else []


class _Process:
    """A Python process that ends with this one if ``setpriv`` is installed; ``environment`` extends this process's."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], **streams: Any) -> None:
        self._process = subprocess.Popen(
            [*_WITH_RUNNER, sys.executable, *arguments],
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,  # a process group, so that DataLoader workers can be ended with it
            **streams,
        )

    def close(self) -> None:
        """End it and its children, also those that it left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Worker(_Process):
    """A process for one run of ``train.py`` or a peer."""

    def __init__(self) -> None:
        super().__init__(["-m", "benchmarks.worker"], {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Wait until it has imported everything.

        Raises:
            RuntimeError: It ended before.
        """
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            self.close()
            raise RuntimeError(f"a worker ended with status {self._process.returncode} before its run")

    def run(self, program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Run a module's ``main`` with these arguments; return its exit status and output. The process ends with it."""
        assert self._process.stdin is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            request = [program, list(arguments), dict(environment), log.name]
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.close()
            return self._process.wait(), log.read()


class ColdRun(_Process):
    """A process that starts now and imports everything itself.

    With several ``ranks`` it is Composer's launcher, ``composer -n RANKS``, which starts a process per rank.
    """

    def __init__(self, program: str, arguments: Sequence[str], environment: Mapping[str, str], ranks: int = 1) -> None:
        launcher = ["-m", "composer.cli.launcher", "-n", str(ranks)] if ranks > 1 else []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the run
        self._started = time.perf_counter()
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
        super().__init__([*launcher, "-m", program, *arguments], environment, **streams)

    def wait(self) -> tuple[int, str, float]:
        """Exit status, output, and seconds from start to end."""
        status = self._process.wait()
        seconds = time.perf_counter() - self._started
        self._log.seek(0)
        return status, self._log.read(), seconds

    def close(self) -> None:
        super().close()
        self._log.close()


class Workers:
    """Ready processes, which are started in groups of ``ahead``. Thread-safe.

    Args:
        ahead: Number of processes that import together.
        fresh: Start and time a cold process for each run instead.
        bytecode: Folder for the bytecode of cold processes, which an untimed process fills first, as on a machine that
            has run them before.
    """

    def __init__(self, ahead: int = 1, *, fresh: bool = False, bytecode: Path | None = None) -> None:
        self._ahead, self._fresh, self._bytecode = ahead, fresh, bytecode
        self._imported: set[str] = set()
        self._ready: list[Worker] = []
        self._all: list[Worker | ColdRun] = []
        self._lock, self._closed = threading.Lock(), False

    def run(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str], ranks: int = 1
    ) -> tuple[int, str, dict[str, float]]:
        """Run on the next process; return exit status, output and duration.

        The duration is ``run_seconds`` without imports, or ``process_seconds`` of a cold process. Runs with several
        ``ranks`` always use cold processes, because Composer's launcher starts their processes, and are timed only with
        ``fresh``.

        Raises:
            RuntimeError: The workers are closed, or one of them ended while it imported.
        """
        if self._fresh or ranks > 1:
            with self._lock:
                self._check_open()
                if self._fresh and self._bytecode is not None:
                    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self._bytecode)}
                    environment = {**environment, **kept}
                    self._import(program, environment)
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
            turn = time.perf_counter()
            status, output = worker.run(program, arguments, environment)
            return status, output, {"run_seconds": time.perf_counter() - turn}
        finally:
            worker.close()

    def _import(self, program: str, environment: Mapping[str, str]) -> None:
        for module in {__name__, program} - self._imported:
            code = f"import {module} as module; getattr(module, 'import_all', int)()"
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, check=True)
        self._imported |= {__name__, program}

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the workers are closed")

    def close(self) -> None:
        """End all processes, and start no more."""
        self._closed = True
        for worker in [*self._all]:  # without the lock, which a thread holds while its workers import
            worker.close()
        with self._lock:
            for worker in self._all:  # those that this thread started meanwhile
                worker.close()


def import_all() -> None:
    import composer_speedups.data
    import composer_speedups.tasks.export
    import composer_speedups.tasks.models
    import composer_speedups.train.report
    import composer_speedups.train.trainer  # noqa: F401  # imported ahead
    from composer_speedups.train import application  # noqa: F401


def _main() -> None:
    ready = os.dup(1)
    os.dup2(2, 1)  # what is printed during the imports must not precede the message
    import_all()
    from composer_speedups.train.cli import exit_codes

    os.write(ready, _READY.encode())
    os.close(ready)
    line = sys.stdin.readline()
    if not line:  # it was not needed
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
