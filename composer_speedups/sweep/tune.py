"""The command composer-speedups-tune: measure sets of techniques on this machine, and write a YAML with the fastest."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import make_folder, write_atomically, write_json
from composer_speedups.core.settings import Settings, keys_help
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.load import as_yaml, load_config
from composer_speedups.train.config.schema import Config

if TYPE_CHECKING:
    from composer_speedups.sweep.trials import Result

_USAGE = """\
usage: composer-speedups-tune -f FILE [key=value ...] [tune.NAME=VALUE ...]

Measure sets of techniques on this machine for the run that FILE and the key=value pairs describe, and write a YAML with
the fastest set, what was measured, and which sets could not be tried and why. FILE itself is not changed.

exit status: 0 a YAML was written; 1 the original run fails; 2 an invalid key, config or dataset (one-line message).

keys:
"""
PREFIX = "tune."
FIRST_LINE_START = "# Written by composer-speedups-tune"
"""The first line of every tuned YAML."""
_COLUMNS = ("set", "planned run, median (least–most)", "speed relative to original", "step", "start", "peak memory")


class TuneConfig(Settings):
    budget_seconds: float = Field(300.0, ge=1, le=604_800)
    """Seconds to try sets in; the YAML names what could not be tried in that time. The fastest set is run again after
    it."""
    output: str | None = None
    """YAML to write, with all trials in a .json next to it; null for FILE's name with .tuned.yaml in the working
    directory."""
    allow: list[Literal["lower_precision", "recipe"]] | None = None
    """Which of lower_precision and recipe may change; null: lower_precision if FILE already trains in 16 bits."""
    steps: int = Field(50, ge=5, le=100_000)
    """Training steps per trial."""
    repeats: int = Field(2, ge=2, le=20)
    """How often FILE and the fastest set are run again in turns; their spread is the noise."""


def help_text() -> str:
    """The usage, and every ``tune.*`` key with its type, default, bounds and doc line."""
    return f"{_USAGE}{keys_help(TuneConfig, PREFIX)}\n\nAll other keys are those of composer train.py --help.\n"


def main(arguments: list[str]) -> None:
    """Read the arguments, search, and write the YAML."""
    command_line = parse_command_line(arguments, help=help_text)
    settings, overrides = read_settings(TuneConfig, command_line.overrides, PREFIX)
    config = load_config(command_line.file, overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("WORLD_SIZE: tuning measures one process; start this command without a launcher")
    output = output_for(command_line.file, settings.output)
    # They import torch, which is not needed to report an unknown key.
    from composer_speedups.sweep.sets import SETS
    from composer_speedups.sweep.trials import OriginalRun, search
    from composer_speedups.train.environment import environment
    from composer_speedups.train.trainer import open_device, run_of

    in_16_bits = config.trainer.precision != "fp32" or {"mixed_precision", "kahan_optimizer"} & set(config.algorithms)
    if settings.allow is None and in_16_bits:
        settings = settings.replaced(allow=["lower_precision"])
    run = run_of(config.trainer, open_device(config.trainer))
    result = search(OriginalRun(config, run), SETS[run.device.type], settings)
    write_tuned(output, " ".join([command_line.file, *overrides]), config, result, environment())
    print(f"{table_of(result)}\n{output}: {_outcome(result)}", flush=True)


def output_for(file: str, output: str | None) -> Path:
    """The YAML to write for the original ``file``; by default ``x.tuned.yaml`` in the working directory."""
    path = Path(output or f"{Path(file).stem}.tuned.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"tune.output: {path} does not end in .yaml; choose a name that does")
    make_folder(path.parent, "tune.output")
    if path.is_file() and path.samefile(file):
        raise ConfigError(f"tune.output: {path} is FILE itself; choose another name")
    if path.is_file() and not path.read_text(errors="replace").startswith(FIRST_LINE_START):
        raise ConfigError(f"tune.output: {path} exists and was not written by this command; choose another name")
    return path


def write_tuned(path: Path, original: str, config: Config, result: Result, environment: dict[str, Any]) -> None:
    """Write the YAML, and all trials as .json next to it, both atomically."""
    if result.chosen is not None:
        config.algorithms = dict(result.chosen.algorithms)
    machine = environment["gpu"] or f"{environment['cpu']}, {environment['cpu_count']} cores"
    untried = [f"{trial.label}: {trial.reason}" for trial in result.trials if not trial.ok]
    comments = [
        f"{FIRST_LINE_START} on {datetime.now(UTC):%Y-%m-%d} from {original}",
        f"# on {machine}, with torch {environment['torch']}, commit {environment['commit']}",
        f"# {_outcome(result)}",
        f"# Planned run: {result.planned_steps} steps. Differences below {result.noise:,.1f} s count as noise.",
        *(f"# {line}" for line in table_of(result).splitlines()),
        *(f"# Not measured: {line}" for line in untried),
    ]
    log = {"environment": environment, **dataclasses.asdict(result), "algorithms": config.algorithms}
    write_json(path.with_suffix(".json"), log)
    write_atomically(path, "\n".join([*comments, "", as_yaml(config)]))


def _outcome(result: Result) -> str:
    if result.chosen is None:
        return f"original techniques kept: {result.kept_original}"
    times = "; ".join(f"{name} {', '.join(f'{s:,.1f}' for s in each)} s" for name, each in result.again.items())
    return f"{result.speedup:.2f} times as fast with {result.chosen.label} (run in turns: {times})"


def table_of(result: Result) -> str:
    """The measured sets, the fastest first, in comparison with the original one; of each, all its runs count."""
    from tabulate import tabulate

    steps, rows = result.planned_steps, []
    tried = [result.original, *sorted(result.trials, key=lambda trial: trial.planned_seconds(steps))]
    again = [*result.again.values(), *([] for _ in tried)]  # of the original and the fastest
    runs = [(t, [t.planned_seconds(steps), *more]) for t, more in zip(tried, again, strict=False) if t.ok]
    base = statistics.median(runs[0][1])
    for trial, times in sorted(runs, key=lambda pair: statistics.median(pair[1])):
        planned, spread = statistics.median(times), f" ({min(times):,.1f}–{max(times):,.1f})" if len(times) > 1 else ""
        memory = "" if trial.peak_gib is None else f"{trial.peak_gib:.1f} GiB"
        means = [f"{trial.step_seconds * 1e3:.1f} ms", f"{trial.start_seconds:.1f} s"]
        rows.append([trial.label, f"{planned:,.1f} s{spread}", f"{base / planned:.2f}×", *means, memory])
    return tabulate(rows, _COLUMNS, tablefmt="github", disable_numparse=True)


def command() -> None:
    """Entry point of the console command."""
    with exit_codes("tune"):
        main(sys.argv[1:])
