"""Measure and shorten the time from the start of the process to the first trained step.

Importing this module does not import torch, because it runs before anything else is loaded.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from composer_speedups.core.before_imports import EarlyWork, PlannedRun
from composer_speedups.core.private_folders import cache_home, make_private_folder
from composer_speedups.core.process_age import process_age

if TYPE_CHECKING:
    from composer_speedups.train.config.schema import Config

__all__ = ["StartupClock", "kept_bytecode", "look_at_cpu", "open_early", "planned_run", "without_gc"]

_BYTECODE_VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_OWN_HOME = "set XDG_CACHE_HOME to a folder that only you can write to (chmod 700), or bytecode=false"


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
def kept_bytecode(config: Config) -> Iterator[bool]:
    """Keep the packages' bytecode in a folder of the user if the environment does not keep any.

    Many images set PYTHONDONTWRITEBYTECODE or have read-only packages, so that each process compiles all imported
    source code again. Inside the block, and in child processes, Python reads and writes bytecode in
    ``~/.cache/composer_speedups/bytecode`` (see :func:`.cache_home`), which makes the next run start faster. Only the
    user may have write access to it, because Python executes its contents. It has no effect with ``bytecode: false``,
    with a pycache prefix set by the user, if the packages have bytecode, after torch was imported, or if the folder
    cannot be created.

    Yields:
        Whether it is active.

    Raises:
        ConfigError: Other users could put code into the folder.
    """
    if not config.bytecode or sys.pycache_prefix is not None or "torch" in sys.modules or not _lacks_bytecode():
        yield False
        return
    try:
        folder = str(make_private_folder(cache_home() / "bytecode", "bytecode", _OWN_HOME))
    except (OSError, RuntimeError):  # there is no home folder, or it is not writable
        yield False
        return
    flags = sys.dont_write_bytecode, sys.pycache_prefix
    variables = {name: os.environ.get(name) for name in _BYTECODE_VARIABLES}
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = folder
    try:
        yield True
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = flags
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _lacks_bytecode() -> bool:
    """Whether torch, the largest package, has no bytecode and Python would not write it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    unwritable = sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)
    return unwritable and not Path(importlib.util.cache_from_source(spec.origin)).exists()


def open_early(config: Config, early: EarlyWork | None = None) -> None:
    """Start initialization that does not need the interpreter, while the interpreter continues to import.

    On a GPU: this rank's CUDA context, and the work that techniques start there. Failures are ignored here and reported
    by the code that needs the result. No tensor is created.
    """
    import torch

    if config.trainer.device == "cpu" or not torch.cuda.is_available():
        return
    threading.Thread(target=_open_gpu, args=(int(os.environ.get("LOCAL_RANK", "0")),), daemon=True).start()
    if early is not None:
        early.on_gpu()


def planned_run(config: Config) -> PlannedRun:
    """The properties of the run that techniques may use before torch is imported."""
    model = {"name": config.model.name, "size": config.model.size, "dropout": config.model.dropout}
    return PlannedRun(config.algorithms, model, config.trainer.precision, config.trainer.device)


def look_at_cpu() -> threading.Thread:
    """Let Composer look up the processor's name, which takes a second and which its Trainer waits for.

    Returns:
        The thread of the look-up. Join it before building a Trainer, which would otherwise look it up again.
    """
    from composer.utils.collect_env import get_cpu_model  # caches the result

    thread = threading.Thread(target=get_cpu_model, daemon=True)
    thread.start()
    return thread


def _open_gpu(index: int) -> None:
    import torch

    with contextlib.suppress(RuntimeError, AssertionError):
        torch.cuda.synchronize(index)  # creates the context, and releases the GIL meanwhile
