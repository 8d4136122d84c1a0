"""python -m composer_speedups.tune -f FILE [key=value ...] [tune.NAME=VALUE ...]; see ``--help``."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from composer_speedups.core.command_line import parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config
from composer_speedups.tune.settings import PREFIX, TuneConfig, help_text, output_for

__all__ = ["command", "main"]


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
        raise ConfigError("WORLD_SIZE: tuning measures one process; start it with python -m, without a launcher")
    output = output_for(command_line.file, settings.output)
    tune(config, settings, output, command_line.file, overrides)


def tune(config: Config, settings: TuneConfig, output: Path, file: str, overrides: list[str]) -> None:
    """Search for the fastest techniques of a run, and write its YAML with them."""
    # They import torch, which is not needed to report an unknown key.
    from composer_speedups.core.catalogue import technique_names
    from composer_speedups.core.registry import technique_class
    from composer_speedups.train.environment import environment
    from composer_speedups.train.trainer import context_of, open_device
    from composer_speedups.tune.candidates import candidates_for
    from composer_speedups.tune.search import Search
    from composer_speedups.tune.trials import OriginalRun
    from composer_speedups.tune.write import write_tuned

    run = OriginalRun(config, context_of(config.trainer, open_device(config.trainer)))
    device = run.context.device.type
    if settings.allow is None and run.trains_in_16_bits:
        settings = dataclasses.replace(settings, allow=["lower_precision"])
    print(
        f"tune: {config.trainer.max_duration} of {run.batches_per_epoch} batches each on the {device} with "
        f"{', '.join(run.techniques) or 'no techniques'}; allowed in addition to exact techniques: "
        f"{', '.join(settings.allow or ['nothing'])}",
        flush=True,
    )
    candidates = candidates_for(run.techniques, device, autocast_by_config=config.trainer.precision != "fp32")
    sizes = device == "cuda" if settings.batch_sizes is None else settings.batch_sizes
    result = Search(run, candidates, settings, config.data.batch_size if sizes else None).run()
    result.unengaged.update(run.unengaged)
    untried = [technique for name in technique_names() if not (technique := technique_class(name)).trials]
    result.never = {technique.name: f"it {technique.purpose}, and tune minimizes time" for technique in untried}
    write_tuned(output, file, overrides, result, environment(), settings.budget_seconds)
    kept = f"original techniques kept: {result.kept_original}"
    outcome = f"{result.speedup:.2f} times as fast" if result.speedup else kept
    print(f"{output}: {outcome}; {', '.join(result.chosen) or 'no technique'}", flush=True)


def command() -> None:
    """Entry point of ``python -m composer_speedups.tune`` and its console command."""
    with exit_codes("tune"):
        main(sys.argv[1:])


if __name__ == "__main__":
    command()
