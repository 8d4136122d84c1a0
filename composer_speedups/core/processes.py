"""This process's age, the output of other programs, and Python modules run with this process's import path."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def process_age() -> float:
    """Seconds since this process was started; psutil's start may be a second early."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # starttime: proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def command_output(*command: str, timeout: float | None = 20.0) -> str | None:
    """A program's stripped output; None if it is not installed, fails, or takes more than ``timeout`` seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def python_module_command(name: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module with this process's import path and without the working directory's modules, and
    its environment."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return [sys.executable, "-P", "-m", name, *arguments], {**os.environ, "PYTHONPATH": path}


@functools.cache
def killed_with_parent() -> list[str]:
    """Prefix of a command that the kernel kills when the thread that started it ends; empty without ``setpriv``."""
    prefix = ["setpriv", "--pdeathsig", "KILL", "--"]
    return prefix if command_output(*prefix, "true") is not None else []


def kill_process_group(process: Any) -> None:
    """Kill a process with a group of its own (a Popen with ``start_new_session=True`` or a Fork), and its children, and
    wait for it. Call it once: the ID of the group may belong to other processes later."""
    with contextlib.suppress(ProcessLookupError):  # the process group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
