"""The runs of a command, one for each config and seed, and the table of their metrics."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer_speedups.core.errors import ConfigError
from composer_speedups.train.config.differences import differences
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config
from composer_speedups.train.inputs import Inputs, changed_input, inputs_of

__all__ = ["Run", "planned_runs", "table"]


class Run(NamedTuple):
    """A config with one seed."""

    base: str  # the config's run_name before the seed was added
    seed: int
    config: Config
    folder: Path
    arguments: list[str]  # command line of train.py
    inputs: Inputs  # the files that it reads, by content, when the command started

    def metrics(self) -> dict[str, float | None] | None:
        """The metrics in the report; None if the run has not finished, or was trained with another config or other
        files."""
        if self.changed() or differences(self.config, self.folder / "config.yaml") != []:
            return None
        metrics: dict[str, float | None] | None = self._report().get("metrics")
        return metrics

    def changed(self) -> str | None:
        """The key and name of a file that has changed since a finished run read it."""
        report = self._report()
        return changed_input(report.get("inputs", {}), self.inputs) if report else None

    def _report(self) -> dict[str, Any]:
        try:
            report = json.loads((self.folder / "report.json").read_text())
            return report if isinstance(report, dict) else {}
        except (OSError, ValueError):
            return {}


def planned_runs(files: Sequence[str], overrides: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """The runs of all seeds of the first file, then those of the next one.

    Raises:
        UserError: A config is invalid, or a file that the runs read is missing.
    """
    if any(pair.partition("=")[0] == "seed" for pair in overrides):
        raise ConfigError("command line: seed differs between the runs; set seeds, such as seeds=1..5")
    configs = [load_config(file, overrides) for file in files]
    names = [config.run_name for config in configs]
    if shared := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"run_name: {shared[0]!r} is the name of two files; give each a name of its own")
    runs = []
    for file, config in zip(files, configs, strict=True):
        common = [*overrides]
        if config.loggers.wandb is not None and config.loggers.wandb.group is None:
            common.append(f"loggers.wandb.group={'-'.join(names)[:128]}")  # W&B's limit
        inputs = inputs_of(config)
        for seed in seeds:
            values = [*common, f"seed={seed}", f"run_name={config.run_name}-seed{seed}"]
            seeded = load_config(file, values)
            folder = Path(seeded.runs_folder) / seeded.run_name
            runs.append(Run(config.run_name, seed, seeded, folder, ["-f", file, *values], inputs))
    return runs


def table(runs: Sequence[Run]) -> list[str]:
    """Mean and standard deviation (of a sample, n - 1) of each metric of the last evaluation, as Markdown."""
    lines = ["| run_name | metric | runs | mean | standard deviation |", "|---|---|---|---|---|"]
    for base in dict.fromkeys(run.base for run in runs):
        reports = {run.seed: run.metrics() for run in runs if run.base == base}
        finished = [metrics for metrics in reports.values() if metrics is not None]
        for name in dict.fromkeys(n for metrics in finished for n in metrics if not n.startswith("train_")):
            values = [value for metrics in finished if (value := metrics.get(name)) is not None]  # null stands for NaN
            mean = f"{statistics.mean(values):.4f}" if values else ""
            deviation = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
            lines.append(f"| {base} | {name} | {len(values)} of {len(reports)} | {mean} | {deviation} |")
        if missing := ", ".join(str(seed) for seed, metrics in reports.items() if metrics is None):
            lines.append(f"| {base} | failed: seed {missing} | | | |")
    return lines
