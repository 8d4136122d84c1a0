"""Start the training program as a child process, whose output goes to a file."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from composer_speedups.core.subprocesses import killed_with_parent, python_module_command

__all__ = ["TRAIN", "start_training"]

TRAIN = "composer_speedups.train"
"""The module that trains."""


def start_training(
    arguments: Sequence[str], output: IO[bytes], environment: Mapping[str, str], program: str = TRAIN
) -> subprocess.Popen[bytes]:
    """Start a run in a process group of its own, which ``kill_process_group`` ends with its DataLoader workers and
    compilers. With ``setpriv``, it is killed when the thread that started it ends.

    Args:
        arguments: Command line of train.py.
        output: File that receives its output and errors.
        environment: Variables to add to this process's environment.
        program: The module to run; replaced in tests.
    """
    command, own = python_module_command(program, *arguments)
    return subprocess.Popen(
        [*killed_with_parent(), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**own, **environment},
        start_new_session=True,
    )
