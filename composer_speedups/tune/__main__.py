"""python -m composer_speedups.tune -f FILE [key=value ...] [tune.NAME=VALUE ...]; see ``--help``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from composer_speedups.core.errors import CannotRunError, ConfigError
from composer_speedups.train.cli import exit_codes, parse_command_line
from composer_speedups.train.config.load import load_with_origins
from composer_speedups.train.config.schema import Config
from composer_speedups.train.startup import kept_bytecode
from composer_speedups.tune.output import check_output, default_output
from composer_speedups.tune.settings import TuneConfig, help_text, read_settings
from composer_speedups.tune.trial import Trials


def main(arguments: list[str]) -> None:
    command = parse_command_line(arguments)
    if command.help:
        print(help_text())
        return
    if command.file is None:
        raise ConfigError("command line: no config file; add -f yamls/quickstart.yaml, or --help for all keys")
    settings, overrides = read_settings(command.overrides)
    config, _ = load_with_origins(command.file, overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("WORLD_SIZE: tuning measures one process; start it with python -m, without a launcher")
    output = Path(settings.output) if settings.output else default_output(command.file)
    check_output(output, command.file)
    with kept_bytecode(config):
        tune(config, settings, Trials(config), output, command.file, overrides)


def tune(config: Config, settings: TuneConfig, measure: Trials, output: Path, file: str, overrides: list[str]) -> None:
    from composer_speedups.train.environment import environment
    from composer_speedups.tune.candidates import CHOICES
    from composer_speedups.tune.given import Given
    from composer_speedups.tune.results import Bench
    from composer_speedups.tune.search import BaselineError, Search
    from composer_speedups.tune.write import write_tuned

    given = Given(config)
    allow = given.allowed(settings.allow)
    print(f"tune: {given.described}; allowed beside exact techniques: {', '.join(allow) or 'nothing'}", flush=True)
    bench = Bench(measure, given.refusal, given.planned_steps, time.monotonic, lambda line: print(line, flush=True))
    sizes = given.device == "cuda" if settings.batch_sizes is None else settings.batch_sizes
    batch_size = config.data.batch_size if sizes else None
    try:
        result = Search(given.techniques, given.candidates(), allow, settings, bench, batch_size).run()
    except BaselineError as error:
        raise CannotRunError("given YAML", str(error), "train.py must run it first") from error
    result.unengaged.update(given.unengaged)
    result.never = {name: choice.never for name, choice in CHOICES.items() if choice.never is not None}
    write_tuned(output, file, overrides, result, environment(), settings.budget_seconds)
    told = f"{result.speedup:.2f} times as fast" if result.speedup else f"given techniques kept: {result.kept_given}"
    print(f"{output}: {told}; {', '.join(result.chosen) or 'no technique'}", flush=True)


def command() -> None:
    """``python -m composer_speedups.tune`` and its console command."""
    with exit_codes("tune"):
        main(sys.argv[1:])


if __name__ == "__main__":
    command()
