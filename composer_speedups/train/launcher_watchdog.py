"""End a rank whose launcher was killed, because nothing else would end it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil

__all__ = ["watch_launcher"]

_LOOK = 1.0  # seconds between two checks
_GRACE = 30.0  # seconds for a batch and a checkpoint, as in Composer's launcher
_PROGRAMS = ("composer", "torchrun")
_MODULES = ("composer.cli.launcher", "torch.distributed.run", "torch.distributed.launch")


def watch_launcher(look: float = _LOOK, grace: float = _GRACE) -> bool:
    """If a launcher started this process as one of its ranks, end this process soon after the launcher ends.

    The process ends as on SIGTERM: after the batch, with a checkpoint if the run writes any, and after ``grace``
    seconds at the latest. Composer's launcher leaves its ranks running when it is killed by SIGTERM, as any launcher
    does on SIGKILL. DataLoader workers watch their parent themselves.

    Returns:
        Whether there is a launcher to watch.
    """
    launcher = os.getppid()
    if "LOCAL_RANK" not in os.environ or not _is_launcher(launcher):
        return False
    untold = threading.Lock()  # taken by whoever writes the line first
    atexit.register(_tell, launcher, untold)  # another rank may notice first, and this one end before it looks
    threading.Thread(target=_watch, args=(launcher, untold, look, grace), daemon=True).start()
    return True


def _is_launcher(pid: int) -> bool:
    """Recognize a launcher by its command line. A shell that started a rank may end before it."""
    try:
        arguments = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return any(Path(argument).name in _PROGRAMS or argument in _MODULES for argument in arguments)


def _watch(launcher: int, untold: threading.Lock, look: float, grace: float) -> None:
    while os.getppid() == launcher:
        time.sleep(look)
    _tell(launcher, untold)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os._exit(128 + signal.SIGTERM)


def _tell(launcher: int, untold: threading.Lock) -> None:
    """Write, once, that the launcher ended, if it did."""
    if os.getppid() == launcher or not untold.acquire(blocking=False):
        return
    with contextlib.suppress(OSError):  # the reader of stderr may be gone as well
        os.write(2, b"train.py: the launcher (process %d) ended before its ranks, so this rank stops\n" % launcher)
