"""What techniques start before a run has imported everything; found by their folders, without importing torch.

A technique's folder may hold a ``before_imports.py`` with one or both of these functions:

- ``before_torch(run: PlannedRun) -> subprocess.Popen | None`` is called before torch is imported, which it must not do.
  A process that it returns is waited for (60 s at most) before the Trainer is built, and ended with the run.
- ``on_gpu(run: PlannedRun) -> None`` is called where there is a GPU to train on, once torch is imported and while the
  GPU is being opened.

Both get the run as plain values. What they cannot start is left to the run itself: they raise nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import subprocess
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["EarlyWork", "PlannedRun", "early_work"]

_AT_MOST = 60.0  # seconds that a run waits for a process


class PlannedRun(NamedTuple):
    """A run before anything of it is loaded.

    Attributes:
        algorithms: YAML name → settings of each technique; None or empty for none.
        model: ``name``, ``size`` and ``dropout``, as the config's ``model`` has them.
        precision: Composer's, such as ``amp_bf16``, where no technique sets another.
        device: ``auto``, ``cpu`` or ``gpu``.
    """

    algorithms: Mapping[str, Mapping[str, Any] | None]
    model: Mapping[str, Any]
    precision: str
    device: str


class EarlyWork:
    """What the techniques of a run have started; see :func:`early_work`."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._hooks = [hook for name in run.algorithms if (hook := _hook_of(name)) is not None]
        self.processes: list[subprocess.Popen[bytes]] = []

    def before_torch(self) -> None:
        for hook in self._hooks:
            if hasattr(hook, "before_torch") and (process := hook.before_torch(self._run)) is not None:
                self.processes.append(process)

    def on_gpu(self) -> None:
        for hook in self._hooks:
            if hasattr(hook, "on_gpu"):
                hook.on_gpu(self._run)

    def wait(self) -> None:
        """Until all processes are done; whatever came of them, the run goes on."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_AT_MOST)


@contextlib.contextmanager
def early_work(run: PlannedRun) -> Iterator[EarlyWork]:
    """Start what the run's techniques want started before torch is imported; at the end its processes are over."""
    work = EarlyWork(run)
    work.before_torch()
    try:
        yield work
    finally:
        for process in work.processes:
            process.kill()
            process.wait()


def _hook_of(technique: str) -> ModuleType | None:
    name = f"composer_speedups.algorithms.{technique}.before_imports"
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
