"""A rank whose launcher was killed: nobody is left to end it, so it ends itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil

__all__ = ["watch_launcher"]

_LOOK = 1.0  # seconds between two looks
_GRACE = 30.0  # seconds for a batch and a checkpoint; as long as Composer's launcher gives its ranks
_PROGRAMS = ("composer", "torchrun")
_MODULES = ("composer.cli.launcher", "torch.distributed.run", "torch.distributed.launch")


def watch_launcher(look: float = _LOOK, grace: float = _GRACE) -> bool:
    """Where a launcher started this process as one of its ranks, end this process soon after the launcher's own end.

    It ends as on SIGTERM: after the batch, with a checkpoint if the run writes any; at the latest after ``grace``
    seconds. Composer's launcher dies of a SIGTERM itself and leaves its ranks behind, as any launcher does on SIGKILL.
    DataLoader workers look for their parent themselves.

    Returns:
        Whether there is a launcher to watch.
    """
    launcher = os.getppid()
    if "LOCAL_RANK" not in os.environ or not _is_launcher(launcher):
        return False
    threading.Thread(target=_watch, args=(launcher, look, grace), daemon=True).start()
    return True


def _is_launcher(pid: int) -> bool:
    """By its command line: a shell that started a rank may end before it."""
    try:
        arguments = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return any(Path(argument).name in _PROGRAMS or argument in _MODULES for argument in arguments)


def _watch(launcher: int, look: float, grace: float) -> None:
    while os.getppid() == launcher:
        time.sleep(look)
    with contextlib.suppress(OSError):  # whoever read it may be gone as well
        os.write(2, b"train.py: the launcher (process %d) ended before its ranks, so this rank stops\n" % launcher)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os._exit(128 + signal.SIGTERM)
