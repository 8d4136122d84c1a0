"""The command composer-speedups-tune: measure sets of techniques on this machine, and write a YAML with the fastest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.settings import keys_help
from composer_speedups.sweep.settings import PREFIX, TuneConfig, output_for
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config

_USAGE = """\
usage: composer-speedups-tune -f FILE [key=value ...] [tune.NAME=VALUE ...]

Measure sets of techniques on this machine for the run that FILE and the key=value pairs describe, and write a YAML with
the fastest set, what was measured, and which sets could not be tried and why. FILE itself is not changed.

exit status: 0 a YAML was written; 1 the original run fails; 2 an invalid key, config or dataset (one-line message).

keys:
"""


def help_text() -> str:
    """The usage, and every ``tune.*`` key with its type, default, bounds and doc line."""
    return f"{_USAGE}{keys_help(TuneConfig, PREFIX)}\n\nAll other keys are those of composer train.py --help.\n"


def main(arguments: list[str]) -> None:
    """Read the arguments, search, and write the YAML.

    Raises:
        Refusal: An unknown key, an invalid value, or an original run that fails.
    """
    command_line = parse_command_line(arguments)
    if command_line.help:
        print(help_text())
        return
    settings, overrides = read_settings(TuneConfig, command_line.overrides, PREFIX)
    config = load_config(command_line.file, overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("WORLD_SIZE: tuning measures one process; start this command without a launcher")
    output = output_for(command_line.file, settings.output)
    _tune(config, settings, output, command_line.file, overrides)


def _tune(config: Config, settings: TuneConfig, output: Path, file: str, overrides: list[str]) -> None:
    # They import torch, which is not needed to report an unknown key.
    from composer_speedups.sweep.search import Search
    from composer_speedups.sweep.sets import SETS
    from composer_speedups.sweep.trials import OriginalRun
    from composer_speedups.sweep.tuned_yaml import table_of, write_tuned
    from composer_speedups.train.environment import environment
    from composer_speedups.train.trainer import open_device, run_of

    run = OriginalRun(config, run_of(config.trainer, open_device(config.trainer)))
    in_16_bits = config.trainer.precision != "fp32" or {"mixed_precision", "kahan_optimizer"} & set(config.algorithms)
    if settings.allow is None and in_16_bits:
        settings = settings.replaced(allow=["lower_precision"])
    device = run.run.device.type
    print(
        f"tune: {config.trainer.max_duration} of {run.batches_per_epoch} batches each on the {device} with "
        f"{', '.join(config.algorithms) or 'no techniques'}; allowed in addition to exact techniques: "
        f"{', '.join(settings.allow or ['nothing'])}",
        flush=True,
    )
    result = Search(run, SETS[device], settings).run()
    write_tuned(output, file, overrides, config, result, environment(), settings.budget_seconds)
    print(table_of(result))
    kept = f"original techniques kept: {result.kept_original}"
    chosen = result.chosen and f"{result.speedup:.2f} times as fast with {result.chosen.label}"
    print(f"{output}: {chosen or kept}", flush=True)


def command() -> None:
    """Entry point of the console command."""
    with exit_codes("tune"):
        main(sys.argv[1:])


if __name__ == "__main__":
    command()
