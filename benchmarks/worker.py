"""Training processes that have imported everything before their turn comes, so that a table takes half the time.

Several start at once, import (Composer's own takes ten seconds and more) and wait; none of them runs while others of
the same batch still import, which would disturb a measurement. Each trains once, in a process of its own. For a
whole job, cold processes take their place, and the clock runs from their start to their end.
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
TRAIN = "composer_speedups.train"  # what trains unless a peer does
_READY = "ready\n"
_SETPRIV = shutil.which("setpriv")
_WITH_RUNNER = [_SETPRIV, "--pdeathsig", "KILL", "--"] if _SETPRIV else []  # a killed runner leaves no run behind


class _Process:
    """A Python process, ended with this one where ``setpriv`` is there; ``environment`` adds to this process's own."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], **streams: Any) -> None:
        self._process = subprocess.Popen(
            [*_WITH_RUNNER, sys.executable, *arguments],
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,  # so that its DataLoader workers can be ended with it
            **streams,
        )

    def close(self) -> None:
        """End it and whatever it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Worker(_Process):
    """One process for one run of ``train.py`` or a peer."""

    def __init__(self) -> None:
        super().__init__(["-m", "benchmarks.worker"], {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Return when it has imported everything.

        Raises:
            RuntimeError: It ended before.
        """
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            raise RuntimeError(f"a worker ended with status {self._process.wait()} before its run")

    def run(self, program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Exit status and output of a module's ``main`` with these arguments; the process ends with it."""
        assert self._process.stdin is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            request = [program, list(arguments), dict(environment), log.name]
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.close()
            return self._process.wait(), log.read()


class ColdRun(_Process):
    """One process that starts now and imports everything itself.

    With more ``ranks`` than one it is Composer's launcher, ``composer -n RANKS``, which starts a process each.
    """

    def __init__(self, program: str, arguments: Sequence[str], environment: Mapping[str, str], ranks: int = 1) -> None:
        launcher = ["-m", "composer.cli.launcher", "-n", str(ranks)] if ranks > 1 else []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the run
        self._started = time.perf_counter()
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
        super().__init__([*launcher, "-m", program, *arguments], environment, **streams)

    def wait(self) -> tuple[int, str, float]:
        """Exit status, output, and seconds from its start to its end."""
        status = self._process.wait()
        seconds = time.perf_counter() - self._started
        self._log.seek(0)
        return status, self._log.read(), seconds

    def close(self) -> None:
        super().close()
        self._log.close()


class Workers:
    """Ready processes, started ``ahead`` at a time; any thread may take one.

    Args:
        ahead: How many import at once.
        fresh: Start a cold process for each run instead, and time it.
        bytecode: A folder for the bytecode of cold processes, which one that is not timed fills first: they then
            find what they would on a machine that has run them before, whatever this environment says of bytecode.
    """

    def __init__(self, ahead: int = 1, *, fresh: bool = False, bytecode: Path | None = None) -> None:
        self._ahead, self._fresh, self._bytecode = ahead, fresh, bytecode
        self._imported: set[str] = set()
        self._ready: list[Worker] = []
        self._all: list[Worker | ColdRun] = []
        self._lock = threading.Lock()

    def run(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str], ranks: int = 1
    ) -> tuple[int, str, dict[str, float]]:
        """Exit status and output of the next one, and how long it took.

        That is ``run_seconds`` from its turn to its end, or ``process_seconds`` from the start of a cold process,
        imports and all. Runs of several ``ranks`` are always cold, and not timed unless all are: Composer's launcher
        starts their processes itself.
        """
        if self._fresh or ranks > 1:
            with self._lock:
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

    def close(self) -> None:
        """End all of them."""
        for worker in self._all:
            worker.close()


def import_all() -> None:
    import composer_speedups.data
    import composer_speedups.tasks.export
    import composer_speedups.tasks.models
    import composer_speedups.train.report
    import composer_speedups.train.trainer  # noqa: F401  # imported ahead
    from composer_speedups.train import application  # noqa: F401


def _main() -> None:
    import_all()
    from composer_speedups.train.cli import exit_codes

    print(_READY, end="", flush=True)
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
