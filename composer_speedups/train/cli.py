"""The command line of train.py: its arguments, ``--help``, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from composer_speedups.core.command_line import console_command, parse_command_line
from composer_speedups.core.errors import Interrupted, Refusal, RunFailedError
from composer_speedups.core.files import out_of_space
from composer_speedups.core.registry import technique_class, technique_names
from composer_speedups.core.settings import help_lines, keys_help
from composer_speedups.train.config.schema import Config

_USAGE = """\
usage: composer train.py -f FILE [key=value ...]

Fine-tune a Hugging Face encoder with Composer and the techniques that FILE lists. FILE is a YAML file, or the name of
one of the package, such as quickstart or glue/mrpc. Later key=value pairs override FILE; values are YAML:
data.batch_size=64, algorithms.torch_compile={}, algorithms.torch_compile.scope=blocks,
algorithms.tf32_matmul=null (removes it). composer train.py and composer-speedups-train take the same arguments.
--print-config prints the complete config as YAML and trains nothing.

exit status: 0 done; 1 the run failed, or the plot or the report did after the model was exported;
2 invalid config, dataset or technique, with one line for each mistake;
143 and 130 stopped by SIGTERM or Ctrl-C, with a checkpoint if checkpoint.interval is set.
"""
_PRINT_CONFIG = "--print-config"
_TECHNIQUES = "techniques (keys of algorithms; each also has its own on_unavailable):"


def read_command_line(arguments: Sequence[str]) -> Config:
    """Read the config from the command line; ``--help`` and ``--print-config`` print and exit with status 0."""
    command = parse_command_line([a for a in arguments if a != _PRINT_CONFIG], help=help_text)
    from composer_speedups.train.config.load import as_yaml, load_config  # imports OmegaConf

    config = load_config(command.file, command.overrides)
    if _PRINT_CONFIG in arguments:
        print(as_yaml(config), end="")
        raise SystemExit(0)
    return config


@contextlib.contextmanager
def exit_codes(program: str = "train.py") -> Iterator[None]:
    """Turn errors into lines on stderr that begin with the program's name, one for each mistake, and an exit status."""
    program = console_command() or program
    formatted, said = warnings.formatwarning, set[str]()

    def once(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        """Format a UserWarning without its source location, and other warnings as Python does."""
        text = f"{filename}:{lineno}: {category.__name__}: {message}\n"
        if issubclass(category, UserWarning):
            text = f"warning: {' '.join(str(message).split())}\n"
        new = text not in said  # changed filters would repeat it
        said.add(text)
        return text if new else ""

    warnings.formatwarning = once
    try:
        yield
        gc.freeze()  # otherwise the interpreter visits a million objects before it exits, which takes seconds
    except Interrupted as stop:
        print(f"{program}: {stop}", file=sys.stderr, flush=True)
        gc.freeze()
        raise
    except KeyboardInterrupt:  # in training, StopSignals handles it
        print(f"{program}: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        if not isinstance(error, Refusal):
            reason = out_of_space(error)
            if reason is None:
                raise
            error = RunFailedError(f"the disk is full: {reason}; free some space")
        for line in error.lines:
            print(f"{program}: {line}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Composer's clean-up at exit would only add tracebacks of an unfinished Trainer.
        os._exit(error.status)
    finally:
        warnings.formatwarning = formatted


def help_text() -> str:
    """The usage, every key with its type, default and doc line, and every technique with its settings."""
    return "\n".join([_USAGE, "keys:", keys_help(Config), "", _TECHNIQUES, *_techniques(), ""])


def _techniques() -> Iterator[str]:
    for name in technique_names():
        technique = technique_class(name)
        summary = (technique.__doc__ or "").split("\n")[0].replace("``", "")
        yield f"  {name}: {summary}"
        yield from (f"    {line}" for line in [*help_lines(technique, omit="on_unavailable")] or ["no settings"])
