"""End a rank whose launcher was killed, because nothing else would end it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["ending_with_launcher"]

_PR_SET_PDEATHSIG = 1  # Linux's prctl: the signal that this process receives when its parent ends
_EXPLANATION = b"train.py: the launcher (process %d) ended before its ranks, so this rank stops\n"
_PROGRAMS = ("composer", "torchrun")
_MODULES = ("composer.cli.launcher", "torch.distributed.run", "torch.distributed.launch")


@contextlib.contextmanager
def ending_with_launcher() -> Iterator[bool]:
    """If a launcher started this process as one of its ranks, let Linux send it SIGTERM when the launcher ends.

    A run with checkpoints then ends after the batch, with a checkpoint. A line on stderr explains it at the end of the
    block. Composer's launcher leaves its ranks running when it is killed by SIGTERM, as any launcher does on SIGKILL.
    DataLoader workers watch their parent themselves.

    Yields:
        Whether this process will end with a launcher.
    """
    launcher = os.getppid()
    if sys.platform != "linux" or "LOCAL_RANK" not in os.environ or not _is_launcher(launcher):
        yield False
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        yield True
    finally:
        if os.getppid() != launcher:
            with contextlib.suppress(OSError):  # the reader of stderr may be gone as well
                os.write(2, _EXPLANATION % launcher)


def _is_launcher(pid: int) -> bool:
    """Recognize a launcher by its command line. A shell that started a rank may end before it."""
    try:
        arguments = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return any(Path(argument).name in _PROGRAMS or argument in _MODULES for argument in arguments)
