"""python -m composer_speedups.repeat -f FILE [-f FILE ...] [seeds=1..5] [key=value ...]; see ``--help``."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

from composer_speedups.core.command_line import parse_command_line, read_settings, usage_as_typed
from composer_speedups.core.errors import ConfigError, RunFailedError
from composer_speedups.core.files import make_folder
from composer_speedups.core.settings import Settings, fields_of, keys_help
from composer_speedups.repeat.processes import gpus_of_processes, train_all
from composer_speedups.repeat.runs import planned_runs, table
from composer_speedups.train.child_process import TRAIN
from composer_speedups.train.cli import exit_codes

__all__ = ["RepeatConfig", "command", "main"]

_USAGE = """\
usage: python -m composer_speedups.repeat -f FILE [-f FILE ...] [seeds=1..5] [processes=N] [key=value ...]

Train every FILE with every seed, each run in a process of its own on one of the visible GPUs, and print the mean and
standard deviation of each metric. -f glue/all takes all YAML files of the package's folder glue. The runs are called
NAME-seed1 and so on, after the file's run_name; the output of each is in NAME-seed1.log next to its folder. Finished
runs are not repeated unless the config or a file that they read has changed, so the same command continues after a
stop. With loggers.wandb, all runs are in one group.

exit status: 0 all runs finished; 1 a run failed; 2 an invalid key or file; 143 and 130 SIGTERM or Ctrl-C.

keys:
"""
_MAX_SEEDS = 1000


def _numbers(items: Sequence[object]) -> list[int]:
    """The numbers in a list of numbers and ranges such as ``1..5``, each one once."""
    numbers: list[int] = []
    for item in map(str, items):
        ends = re.fullmatch(r"(\d{1,10})(?:\.\.(\d{1,10}))?", item)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if not 0 <= last - first < _MAX_SEEDS:
            raise ValueError(f"must be numbers or ranges of at most {_MAX_SEEDS}, such as 1..5 or 1,2,7, not {item!r}")
        numbers += range(first, last + 1)
    return list(dict.fromkeys(numbers))


class RepeatConfig(Settings):
    seeds: Annotated[list[int], BeforeValidator(_numbers)] = Field([1, 2, 3, 4, 5], min_length=1)
    """Seeds to train every file with: 1..5, or 1,2,7."""
    processes: int | None = Field(None, ge=1, le=1024)
    """Runs at a time, which share the GPUs; null for one on each visible GPU, or one without a GPU."""


def main(arguments: Sequence[str], program: str = TRAIN) -> None:
    """Train the runs that have not finished, and print the table of all; ``program`` is the module that trains.

    Raises:
        UserError: An unknown key or invalid value; or, after the table, that a run failed.
    """
    command_line = parse_command_line(arguments, several_files=True)
    if command_line.help:
        usage = usage_as_typed(_USAGE)
        print(f"{usage}{keys_help(RepeatConfig)}\n\nAll other keys are those of composer train.py --help.")
        return
    own = [pair for pair in command_line.overrides if pair.partition("=")[0] in fields_of(RepeatConfig)]
    settings, _ = read_settings(RepeatConfig, own)
    overrides = [pair for pair in command_line.overrides if pair not in own]
    runs = planned_runs(command_line.files, overrides, settings.seeds)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("WORLD_SIZE: each run is one process; start this command without a launcher")
    for folder in {run.folder.parent for run in runs}:
        make_folder(folder, "runs_folder")
    failures = train_all(runs, gpus_of_processes(runs, settings.processes), program)
    print("\n".join(table(runs)), flush=True)
    if failures:
        raise RunFailedError(f"{len(failures)} of {len(runs)} runs failed; the first: {failures[0]}")


def command() -> None:
    """Entry point of ``python -m composer_speedups.repeat`` and its console command."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    with exit_codes("repeat"):
        main(sys.argv[1:])


if __name__ == "__main__":
    command()
