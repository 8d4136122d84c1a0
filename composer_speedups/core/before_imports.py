"""Hooks with which techniques start work before train.py has imported torch. Discovered without importing torch.

A technique's folder may contain a ``before_imports.py`` with one or both of these functions:

- ``before_torch(run: PlannedRun) -> subprocess.Popen | None`` is called before torch is imported and must not import
  it. If it returns a process, train.py waits up to 60 s for it before it builds the Trainer, and kills it when the run
  ends.
- ``on_gpu(run: PlannedRun) -> None`` is called on machines with a GPU, after torch is imported and while CUDA
  initializes.

Both must not raise: work that they cannot start is done later by the run itself.
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

_AT_MOST = 60.0  # seconds to wait for a process


class PlannedRun(NamedTuple):
    """The settings of a run that are known before anything is loaded.

    Attributes:
        algorithms: YAML name → settings of each technique; None or empty for the defaults.
        model: ``name``, ``size`` and ``dropout`` of the config's ``model`` section.
        precision: Composer's precision, such as ``amp_bf16``, unless a technique sets another one.
        device: ``auto``, ``cpu`` or ``gpu``.
    """

    algorithms: Mapping[str, Mapping[str, Any] | None]
    model: Mapping[str, Any]
    precision: str
    device: str


class EarlyWork:
    """The hooks of a run's techniques and the processes that they started; see :func:`early_work`."""

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
        """Wait for all processes to end. Their exit statuses are ignored."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_AT_MOST)


@contextlib.contextmanager
def early_work(run: PlannedRun) -> Iterator[EarlyWork]:
    """Call the ``before_torch`` hooks of the run's techniques, and kill their processes at the end of the block."""
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
