"""Processes of this run's own: what other programs say, and Python programs that import what this one would."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["output_of", "python_module"]


def output_of(*command: str, timeout: float | None = 20.0) -> str | None:
    """A program's output without blank ends; None where there is no such program, it fails, or it takes too long.

    Args:
        command: The program and its arguments.
        timeout: Seconds; None waits as long as it takes.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def python_module(name: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """A child Python that runs a module, imports what this process would, and nothing from the working directory.

    ``python -m`` alone would put the working directory first, and whatever modules lie there.

    Returns:
        The command, and the environment to run it in, a copy of this process's own.
    """
    path = os.pathsep.join(place for place in sys.path if place)
    return [sys.executable, "-P", "-m", name, *arguments], {**os.environ, "PYTHONPATH": path}
