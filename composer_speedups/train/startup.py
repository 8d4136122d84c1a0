"""Measure and shorten the time from the start of the process to the first step; does not import torch itself."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator

from composer_speedups.core.processes import process_age
from composer_speedups.train.config.schema import Config


class StartupClock:
    """Seconds since the start of the process, split into consecutive phases."""

    def __init__(self) -> None:
        self._since = time.time() - process_age()
        self.seconds: dict[str, float] = {}
        self.lap("interpreter")

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to ``phase``."""
        now = time.time()
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
    """Disable garbage collection during imports, and freeze their million objects at the end: a full collection would
    take 0.4 s in some training step, while all other ranks wait."""
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()


def open_gpu_early(config: Config) -> None:
    """Create this rank's CUDA context in a thread during imports; failures are left to the code that needs the GPU."""
    import torch

    def create_context(index: int) -> None:
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.cuda.synchronize(index)  # creates the context, and releases the interpreter lock meanwhile

    if config.trainer.device != "cpu" and torch.cuda.is_available():
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        threading.Thread(target=create_context, args=(rank,), daemon=True).start()


def prefetch_cpu_model() -> threading.Thread:
    """Let Composer look up the processor's name in a thread, which takes a second, before a Trainer does."""
    from composer.utils.collect_env import get_cpu_model  # caches the result

    thread = threading.Thread(target=get_cpu_model, daemon=True)
    thread.start()
    return thread
