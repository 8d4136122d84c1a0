"""Training processes that have imported everything before their turn comes, so that a table takes half the time.

Several start at once, import (Composer's own takes ten seconds and more) and wait; none of them runs while others of
the same batch still import, which would disturb a measurement. Each trains once, in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Worker", "Workers"]

ROOT = Path(__file__).parent.parent
_READY = "ready\n"


class Worker:
    """One process for one run of ``train.py``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # so that its DataLoader workers can be ended with it
        )

    def wait_until_ready(self) -> None:
        """Return when it has imported everything.

        Raises:
            RuntimeError: It ended before.
        """
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            raise RuntimeError(f"a worker ended with status {self._process.wait()} before its run")

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Exit status and output of ``train.py`` with these arguments; the process ends with it."""
        assert self._process.stdin is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            request = {"arguments": list(arguments), "environment": dict(environment), "log": log.name}
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.close()
            return self._process.wait(), log.read()

    def close(self) -> None:
        """End it and whatever it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Workers:
    """Ready processes, started ``ahead`` at a time; any thread may take one."""

    def __init__(self, ahead: int = 1) -> None:
        self._ahead = ahead
        self._ready: list[Worker] = []
        self._all: list[Worker] = []
        self._lock = threading.Lock()

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """:meth:`Worker.run` of the next one."""
        with self._lock:
            if not self._ready:
                started = [Worker() for _ in range(self._ahead)]
                self._all += started
                for worker in started:
                    worker.wait_until_ready()
                self._ready = started
            worker = self._ready.pop()
        try:
            return worker.run(arguments, environment)
        finally:
            worker.close()

    def close(self) -> None:
        """End all of them."""
        for worker in self._all:
            worker.close()


def _main() -> None:
    import composer_speedups.data
    import composer_speedups.export
    import composer_speedups.models
    import composer_speedups.report
    import composer_speedups.trainer  # noqa: F401  # imported ahead
    import train
    from composer_speedups.cli import exit_codes

    print(_READY, end="", flush=True)
    line = sys.stdin.readline()
    if not line:  # it was not needed
        return
    request = json.loads(line)
    log = os.open(request["log"], os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"])
    with exit_codes():
        train.main(request["arguments"])


if __name__ == "__main__":
    _main()
