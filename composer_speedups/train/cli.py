"""The command line of train.py: ``--help``, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence

from composer_speedups.core.errors import (
    CannotRunError,
    ConfigError,
    Interrupted,
    NotEngagedError,
    RunFailedError,
    UserError,
    WriteError,
)
from composer_speedups.core.files import out_of_space
from composer_speedups.train.config import Config, Origins, help_text, load_with_origins, parse_command_line

__all__ = ["exit_codes", "read_command_line"]


def read_command_line(arguments: Sequence[str]) -> tuple[Config, Origins]:
    """The config that the arguments ask for and where each key came from; ``--help`` prints every key and exits with 0.

    Raises:
        ConfigError: One line about the argument, the key or the file.
    """
    command = parse_command_line(arguments)
    if command.help:
        print(help_text())
        raise SystemExit(0)
    if command.file is None:
        raise ConfigError("command line: no config file; add -f yamls/quickstart.yaml, or --help for all keys")
    return load_with_origins(command.file, command.overrides)


@contextlib.contextmanager
def exit_codes(program: str = "train.py") -> Iterator[None]:
    """A user's mistake becomes one line on stderr, which begins with ``program``, and exit status 2.

    A run that failed is one line and 1: a technique had no effect, its first batches showed that it cannot run, the
    loss was no number, a data worker died, or a file could not be written for want of space. One that a signal ended
    after a checkpoint is one line, and 128 and the signal. Any other exception keeps its traceback and Python's
    status 1.
    """
    try:
        yield
        gc.freeze()  # else the interpreter looks through a million objects before it ends, for seconds
    except Interrupted as stop:
        print(f"{program}: {stop}", file=sys.stderr, flush=True)
        gc.freeze()
        raise
    except Exception as error:
        if not isinstance(error, UserError):
            reason = out_of_space(error)
            if reason is None:
                raise
            error = WriteError(f"the disk is full: {reason}; free some space")
        print(f"{program}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Composer's clean-up at exit would only add tracebacks of a Trainer that was never finished.
        os._exit(1 if isinstance(error, (CannotRunError, NotEngagedError, RunFailedError)) else 2)
