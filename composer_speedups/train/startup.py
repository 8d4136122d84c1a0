"""Measure and shorten the time from the start of the process to the first trained step.

Importing this module does not import torch, because it runs before anything else is loaded.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from composer_speedups.core.processes import process_age, python_module_command

if TYPE_CHECKING:
    from composer_speedups.train.config.schema import Config

_MAX_WAIT_SECONDS = 60.0


class StartupClock:
    """Seconds since the start of the process, split into consecutive phases.

    Args:
        now: Returns the time in seconds since the epoch; replaced in tests.
        started: When the process started, by the same clock. Default: from the operating system.
    """

    def __init__(self, now: Callable[[], float] = time.time, started: float | None = None) -> None:
        self._now = now
        self._since = time.time() - process_age() if started is None else started
        self.seconds: dict[str, float] = {}
        self.lap("interpreter")

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to ``phase``."""
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def summary(self) -> dict[str, float]:
        """The ``startup`` section of report.json: ``<phase>_seconds``, and their sum ``to_first_step_seconds``."""
        return {
            **{f"{phase}_seconds": seconds for phase, seconds in self.seconds.items()},
            "to_first_step_seconds": sum(self.seconds.values()),
        }


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection inside the block, because imports create a million permanent objects that each pass
    visits.

    If torch is imported inside, all objects that exist at the end are frozen. Otherwise a full collection would take
    0.4 s in some training step, while all other ranks wait.
    """
    enabled, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first and "torch" in sys.modules:
            gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def early_processes(config: Config) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the ``before_imports`` modules of the run's techniques while this process imports torch.

    A technique whose folder has a ``before_imports.py`` can prepare files that the run finds later, such as compiled
    kernels. It is executed as a program of its own, because imports hold this process's interpreter lock for seconds.
    Its standard input is a JSON object: ``algorithms`` and ``model``, as in the config, and ``precision``. Only local
    rank 0 starts it, and only on a machine with a GPU. Its failure is ignored, because the run can do the work itself.

    Yields:
        The processes, which are killed at the end of the block. See :func:`wait_for`.
    """
    processes: list[subprocess.Popen[bytes]] = []
    gpu = config.trainer.device != "cpu" and Path("/dev/nvidiactl").exists()
    for name in config.algorithms if gpu and os.environ.get("LOCAL_RANK", "0") == "0" else ():
        folder = f"composer_speedups.algorithms.{name}"  # optimizers share another one
        module = f"{folder}.before_imports"
        if importlib.util.find_spec(folder) is not None and importlib.util.find_spec(module) is not None:
            model = {key: getattr(config.model, key) for key in ("name", "size", "dropout")}
            run = {"algorithms": config.algorithms, "model": model, "precision": config.trainer.precision}
            processes.append(_start(module, json.dumps(run, default=str)))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(module: str, text: str) -> subprocess.Popen[bytes]:
    command, environment = python_module_command(module)
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=environment)
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:  # the process may have ended
        process.stdin.write(text.encode())
    return process


def wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for processes to end, for a minute each at most. Their exit statuses are ignored."""
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_MAX_WAIT_SECONDS)


def open_gpu_early(config: Config) -> None:
    """Create this rank's CUDA context in a thread while the interpreter continues to import. No tensor is created.

    Failures are ignored here and reported by the code that needs the GPU.
    """
    import torch

    def create_context(index: int) -> None:
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.cuda.synchronize(index)  # creates the context, and releases the interpreter lock meanwhile

    if config.trainer.device != "cpu" and torch.cuda.is_available():
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        threading.Thread(target=create_context, args=(rank,), daemon=True).start()


def prefetch_cpu_model() -> threading.Thread:
    """Let Composer look up the processor's name, which takes a second and which its Trainer waits for.

    Returns:
        The thread of the look-up. Join it before building a Trainer, which would otherwise look it up again.
    """
    from composer.utils.collect_env import get_cpu_model  # caches the result

    thread = threading.Thread(target=get_cpu_model, daemon=True)
    thread.start()
    return thread
