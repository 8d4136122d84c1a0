"""Child processes: the output of other programs, and Python modules run with this process's import path."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["command_output", "python_module_command"]


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
