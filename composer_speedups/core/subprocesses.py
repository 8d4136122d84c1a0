"""Child processes: the output of other programs, and Python modules run with this process's import path."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from typing import Any


def command_output(*command: str, timeout: float | None = 20.0) -> str | None:
    """A program's stripped standard output; None if it is not installed, fails, or runs into the timeout.

    Args:
        command: The program and its arguments.
        timeout: Seconds; None means no limit.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def python_module_command(name: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module in a child Python with this process's import path.

    Unlike plain ``python -m``, it does not import modules from the working directory.

    Returns:
        The command, and the environment to run it in, which is a copy of this process's environment.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return [sys.executable, "-P", "-m", name, *arguments], {**os.environ, "PYTHONPATH": path}


@functools.cache
def killed_with_parent() -> list[str]:
    """Prefix of a command that the kernel kills when the thread that started it ends.

    No child then outlives a killed parent, and the thread must live until the child ends. Empty without ``setpriv`` of
    util-linux 2.33 or newer.
    """
    prefix = ["setpriv", "--pdeathsig", "KILL", "--"]
    return prefix if command_output(*prefix, "true") is not None else []


def kill_process_group(process: subprocess.Popen[Any]) -> None:
    """Kill a child that was started with ``start_new_session=True``, and its children, even if it has ended; wait for
    it. Call it once: the ID of the group may belong to other processes later."""
    with contextlib.suppress(ProcessLookupError):  # the process group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
