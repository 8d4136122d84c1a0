"""From the start of the process to the first trained step: what takes the time, and what shortens it.

Nothing here imports torch at once: the clock starts, and the imports are prepared, before anything else is loaded.
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

import psutil

from composer_speedups.core.before_imports import EarlyWork, PlannedRun
from composer_speedups.core.private_folders import cache_home, make_private_folder

if TYPE_CHECKING:
    from composer_speedups.train.config.schema import Config

__all__ = ["StartupClock", "kept_bytecode", "look_at_cpu", "open_early", "planned_run", "without_gc"]

_BYTECODE_VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_OWN_HOME = "set XDG_CACHE_HOME to a folder that only you can write to (chmod 700), or bytecode=false"


class StartupClock:
    """Seconds from the start of the process, split into phases that leave nothing out.

    Args:
        now: The clock, in seconds since the epoch; tests give their own.
        started: When the process started, by the same clock. Default: as the system says.
    """

    def __init__(self, now: Callable[[], float] = time.time, started: float | None = None) -> None:
        self._now = now
        self._since = psutil.Process().create_time() if started is None else started
        self.seconds: dict[str, float] = {}
        self.lap("interpreter")

    def lap(self, phase: str) -> None:
        """Everything since the last lap belongs to ``phase``."""
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
    """No garbage collection inside: imports make a million objects that live on, and each pass looks at all of them.

    Where torch is imported inside, none of what is there by the end is ever looked at again. Otherwise a pass of 0.4 s
    would come in some training step, for which all other ranks wait.
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
    """Keep the packages' bytecode in a folder of the user's own where the environment keeps none.

    In many images PYTHONDONTWRITEBYTECODE is set, or the packages cannot be written to, and each process compiles
    the source of all it imports anew. Inside, and in processes started there, Python reads and writes bytecode in
    ``~/.cache/composer_speedups/bytecode`` instead (see :func:`.cache_home`): the second run finds what the first one
    left. Nobody else may be able to write there, for Python runs what it finds. Nothing changes with ``bytecode:
    false``, with a prefix of the user's own, with bytecode in its usual place, once torch is loaded, or where the
    folder cannot be made.

    Yields:
        Whether it is in force.

    Raises:
        ConfigError: Others could put code into the folder.
    """
    if not config.bytecode or sys.pycache_prefix is not None or "torch" in sys.modules or not _lacks_bytecode():
        yield False
        return
    try:
        folder = str(make_private_folder(cache_home() / "bytecode", "bytecode", _OWN_HOME))
    except (OSError, RuntimeError):  # no home folder, or one that cannot be written to
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
    """Whether torch, the largest of the packages, has no bytecode, and Python would not write it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    unwritable = sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)
    return unwritable and not Path(importlib.util.cache_from_source(spec.origin)).exists()


def open_early(config: Config, early: EarlyWork | None = None) -> None:
    """Start what waits on something else than the interpreter, while the interpreter goes on importing.

    On a GPU: the CUDA context of this rank, and what techniques want started there. What fails here is left to the
    code that needs it, which says so. No tensor is made.
    """
    import torch

    if config.trainer.device == "cpu" or not torch.cuda.is_available():
        return
    threading.Thread(target=_open_gpu, args=(int(os.environ.get("LOCAL_RANK", "0")),), daemon=True).start()
    if early is not None:
        early.on_gpu()


def planned_run(config: Config) -> PlannedRun:
    """What techniques may know of the run before torch is imported."""
    model = {"name": config.model.name, "size": config.model.size, "dropout": config.model.dropout}
    return PlannedRun(config.algorithms, model, config.trainer.precision, config.trainer.device)


def look_at_cpu() -> threading.Thread:
    """Have Composer find out the processor's name, which its Trainer waits for: a process that takes a second.

    Returns:
        The thread that waits for it; join it before building a Trainer, which would start a second process.
    """
    from composer.utils.collect_env import get_cpu_model  # keeps what it found

    thread = threading.Thread(target=get_cpu_model, daemon=True)
    thread.start()
    return thread


def _open_gpu(index: int) -> None:
    import torch

    with contextlib.suppress(RuntimeError, AssertionError):
        torch.cuda.synchronize(index)  # opens the context, and lets other threads run meanwhile
