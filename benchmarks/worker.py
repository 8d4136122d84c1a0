"""Training processes that start in a second: a parent imports everything once, and each run is a fork of it.

The parent never touches the GPU, so a fork is as fresh as a new process to CUDA, torch.compile and Composer. What a
run's report calls ``wall_seconds`` then leaves the imports out.
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
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Worker", "close_workers", "worker_of_this_thread"]

ROOT = Path(__file__).parent.parent
# torch.cuda.is_available() asks the driver's library instead of starting CUDA, which a fork could not use.
_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}


_own = threading.local()
_started: list[Worker] = []


def worker_of_this_thread() -> Worker:
    """The calling thread's worker, started when first asked for."""
    if getattr(_own, "worker", None) not in _started:
        _own.worker = Worker()
        _started.append(_own.worker)
    return _own.worker


def close_workers() -> None:
    """End all workers and whatever they run."""
    while _started:
        _started.pop().close()


class Worker:
    """One parent process; its runs follow one another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # so that its runs can be ended with it
        )

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """Exit status and output of ``train.py`` with these arguments.

        Raises:
            RuntimeError: The parent itself ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            request = {"arguments": list(arguments), "environment": dict(environment), "log": log.name}
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the worker ended with status {self._process.wait()}")
            return int(answer), log.read()

    def close(self) -> None:
        """End the parent and whatever it runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _serve() -> None:
    import composer_speedups.data
    import composer_speedups.export
    import composer_speedups.models
    import composer_speedups.report
    import composer_speedups.trainer  # noqa: F401  # imported for the forks

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _train(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _train(request: dict[str, object]) -> None:
    import train
    from composer_speedups.cli import exit_codes

    log = os.open(str(request["log"]), os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        with exit_codes():
            train.main(request["arguments"])  # type: ignore[arg-type]
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
