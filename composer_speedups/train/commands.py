"""What other programs say, git and nvidia-smi above all; imports no torch."""

from __future__ import annotations

import subprocess

__all__ = ["output_of"]


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
