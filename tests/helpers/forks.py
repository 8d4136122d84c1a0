"""Processes with everything imported, forked from one that has only done the imports.

The test's own process cannot be forked: once autograd has started threads or CUDA was initialized, a child could not
train.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import dill  # functions within functions, which pickle does not take

from tests.helpers.hangs import HANGS

_warm: subprocess.Popen[bytes] | None = None


class Done(NamedTuple):
    status: int  # negative for a signal's number
    stderr: str


class Fork:
    """A process that runs a copy of ``function`` in the current folder, with its output in ``<name>.err``.

    Its exit status is 0, that of a SystemExit, or 1 with a traceback.
    """

    def __init__(self, function: Callable[[], Any], name: str = "fork", **environment: str) -> None:
        global _warm
        if _warm is None:
            command = [sys.executable, "-m", "tests.helpers.forks"]
            root = Path(__file__).parents[2]
            _warm = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)
            atexit.register(_warm.kill)
        assert _warm.stdin is not None
        assert _warm.stdout is not None
        self.path = Path(f"{name}.err").absolute()
        self._ended = self.path.with_suffix(f".{time.monotonic_ns()}.status")
        dill.dump((function, self.path, self._ended, {**os.environ, **environment}), _warm.stdin)
        _warm.stdin.flush()
        self.pid = int(_warm.stdout.readline())

    def wait(self, seconds: float = HANGS) -> Done:
        """Wait for its end; after ``seconds``, kill it and raise TimeoutError."""
        if not self.ends_within(seconds):
            self.signal(signal.SIGKILL)
            raise TimeoutError(f"it still runs after {seconds} s: {self.path.read_text()[-3000:]}")
        return Done(int(self._ended.read_text()), self.path.read_text())

    def ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._ended.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Fork a child for each request and record its exit status, until the tests are over."""
    running: dict[int, Path] = {}
    while True:
        if select.select([requests], [], [], 0.05)[0]:
            try:
                function, path, ended, environment = dill.load(requests)
            except EOFError:
                return
            pid = os.fork()
            if not pid:
                _run(function, path, environment)
            running[pid] = ended
            replies.write(b"%d\n" % pid)
            replies.flush()
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended = running.pop(pid)
            partial = ended.with_suffix(".partial")
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.rename(ended)


def _run(function: Callable[[], Any], path: Path, environment: dict[str, str]) -> None:
    """Run the function in a forked child, and end it."""
    status = 1
    try:
        os.chdir(path.parent)
        os.environ.clear()
        os.environ.update(environment)
        nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for source, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        warnings.resetwarnings()  # as in a user's process
        function()
        status = 0
    except SystemExit as stop:  # Python prints a message and exits with 1
        status = int(stop.code or 0) if not isinstance(stop.code, str) else 1
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def skip_isa_probe() -> None:
    """Make inductor assume the instruction sets that it names, without AMX; it would compile and load a probe of each
    in every process."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import VecAMX

    config.cpp.vec_isa_ok = True
    VecAMX.__bool__ = lambda _: False  # type: ignore[method-assign]


if __name__ == "__main__":
    from composer.models import huggingface

    from composer_speedups.sweep.forks import import_all
    from composer_speedups.train.startup import prefetch_cpu_model
    from tests.helpers.common import tiny_bert
    from tests.helpers.forks import _serve as serve  # not as __main__, which requests do not refer to

    import_all()
    prefetch_cpu_model().join()  # otherwise each child would start a process
    skip_isa_probe()
    huggingface._is_registered_causal_lm(tiny_bert())  # otherwise each child would import all model classes
    # Prints must not end up among the replies.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    serve(os.fdopen(0, "rb", buffering=0), answers)  # type: ignore[arg-type]
