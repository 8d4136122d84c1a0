"""Processes that begin with everything imported: forked from the test's own, with their output in files."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Done", "Fork", "on_ranks"]


class Done(NamedTuple):
    status: int  # negative for a signal's number
    stderr: str


class Fork:
    """A process that runs ``function`` in the current folder and ends with 0, or with 1 and a traceback.

    Args:
        function: What it runs.
        name: Its stderr goes to ``<name>.err``.
        environment: Variables set in it.
    """

    def __init__(self, function: Callable[[], Any], name: str = "fork", **environment: str) -> None:
        self.path = Path(f"{name}.err").absolute()
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.environ.update(environment)
            out = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            warnings.resetwarnings()  # those of a user's own process
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait(self, seconds: float = 120) -> Done:
        """Its end; it is killed where it does not come in time."""
        deadline = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return Done(os.waitstatus_to_exitcode(status), self.path.read_text())
            if time.monotonic() > deadline:
                os.kill(self.pid, 9)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"it goes on after {seconds} s: {self.path.read_text()[-3000:]}")
            time.sleep(0.05)


def on_ranks(function: Callable[[], Any], ranks: int = 2) -> list[Done]:
    """``function`` in as many processes of one Composer run on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def run() -> None:
        from composer.devices import DeviceCPU
        from composer.utils import dist

        dist.initialize_dist(DeviceCPU(), timeout=60)
        function()

    numbers = [{"RANK": str(r), "LOCAL_RANK": str(r), "NODE_RANK": "0"} for r in range(ranks)]
    forks = [Fork(run, f"rank{r}", **shared, **number) for r, number in enumerate(numbers)]
    return [fork.wait() for fork in forks]
