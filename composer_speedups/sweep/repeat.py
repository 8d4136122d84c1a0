"""The command composer-speedups-repeat: train configs with several seeds and values, and print how metrics spread."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field
from tabulate import tabulate

from composer_speedups.callbacks.config import smaller_is_better
from composer_speedups.core.command_line import list_items, parse_command_line, read_settings
from composer_speedups.core.errors import ConfigError, RunFailedError
from composer_speedups.core.files import lock_file, make_folder
from composer_speedups.core.processes import command_output
from composer_speedups.core.registry import technique_class, technique_names
from composer_speedups.core.settings import Settings, fields_of, keys_help, keys_of, parts_of
from composer_speedups.sweep.processes import TRAIN, Ended, Job, Process, run_all
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.load import differences, load_config
from composer_speedups.train.config.schema import Config
from composer_speedups.train.inputs import Inputs, changed_input, inputs_of

_USAGE = """\
usage: composer-speedups-repeat -f FILE [-f FILE ...] [seeds=1..5] [processes=N] [key=value ...]

Train every FILE with every seed, each run in a process of its own on one of the visible GPUs, and print the mean and
standard deviation of each metric. -f glue/all takes all YAML files of the package's folder glue. The runs are called
NAME-seed1 and so on, after the file's run_name; the output of each is in NAME-seed1.log next to its folder. Finished
runs are not repeated unless the config or a file that they read has changed, so the same command continues after a
stop. With loggers.wandb, all runs are in one group.

A list for a key that takes no list, such as 'optimizer.lr=[1e-5,3e-5]', trains with each of its values, and several
such keys with all combinations. The table has a row for each, and a line below it names the best.

exit status: 0 all runs finished; 1 a run failed; 2 an invalid key or file; 143 and 130 SIGTERM or Ctrl-C.

keys:
"""


_MAX = 1000  # numbers in a range


def numbers(items: Sequence[object]) -> list[int]:
    """The numbers in a list of numbers and ranges such as ``1..5``, each one once."""
    found: list[int] = []
    for item in map(str, items):
        ends = re.fullmatch(r"(\d{1,10})(?:\.\.(\d{1,10}))?", item)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if not 0 <= last - first < _MAX:
            raise ValueError(f"must be numbers or ranges of at most {_MAX}, such as 1..5 or 1,2,7, not {item!r}")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


class RepeatConfig(Settings):
    seeds: Annotated[list[int], BeforeValidator(numbers)] = Field([1, 2, 3, 4, 5], min_length=1)
    """Seeds to train every file with: 1..5, or 1,2,7."""
    processes: int | None = Field(None, ge=1, le=1024)
    """Runs at a time, which share the GPUs; null for one on each visible GPU, or one without a GPU."""
    metric: str | None = Field(None, min_length=1)
    """With lists of values: metric by which the best is named; null for checkpoint.best's, or the table's first."""


class Run(NamedTuple):
    """A config with one value of each key that has several, and one seed."""

    file: str
    point: str  # the keys with several values, each with its own: ``optimizer.lr=1e-5``
    base: str  # the config's run_name with these values, before the seed was added
    seed: int
    config: Config
    folder: Path
    arguments: list[str]  # command line of train.py
    inputs: Inputs  # the files that it reads, by content, when the command started

    def metrics(self) -> dict[str, float | None] | None:
        """The evaluation's metrics in the report, None for NaN; None if the run has not finished, or had another config
        or other files."""
        path = self.folder / "report.json"
        if not path.exists() or differences(self.config, self.folder / "config.yaml") != []:
            return None
        report: dict[str, Any] = json.loads(path.read_text())
        if changed_input(report.get("inputs", {}), self.inputs):
            return None
        return {name: value for name, value in report["metrics"].items() if not name.startswith("train_")}

    def finished(self, metric: str | None) -> bool:
        """Whether there are metrics; a ConfigError if ``metric`` is not one of them."""
        metrics = self.metrics()
        if metrics is not None and metric is not None and _reported(metric, metrics) not in metrics:
            known = ", ".join(metrics) or "none"
            raise ConfigError(f"metric: {metric!r} is not a metric of {self.folder.name}; known: {known}")
        return metrics is not None


def _alternatives(pair: str) -> list[str]:
    """Expand a list into ``key=value`` pairs if the key takes no list; otherwise return the pair itself."""
    key, _, text = pair.partition("=")
    settings: type[Settings] = Config
    name = key.removeprefix("baseline.")
    section, _, rest = name.removeprefix("algorithms.").partition(".")
    if name.startswith("algorithms.") and section in technique_names():
        settings, name = technique_class(section), rest
    kinds = set[Any]().union(*(parts_of(field.annotation) for known, field, _ in keys_of(settings) if known == name))
    items = None if {list, Any} & kinds else list_items(text)
    return [pair] if items is None else [f"{key}={item}" for item in items]


def planned_runs(files: Sequence[str], overrides: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """All runs, ordered by file, then by the values of each key, then by seed."""
    if any(pair.partition("=")[0] == "seed" for pair in overrides):
        raise ConfigError("command line: seed differs between the runs; set seeds, such as seeds=1..5")
    keys, values_of = [pair.partition("=")[0] for pair in overrides], [*map(_alternatives, overrides)]
    for key, pair, values in zip(keys, overrides, values_of, strict=True):
        if values != [pair] and keys.count(key) > 1:
            raise ConfigError(f"command line: {key} is given twice; give it once, with all its values")
    points = [*itertools.product(*values_of)]
    if not points:
        raise ConfigError("command line: a key has an empty list of values; name one or more")
    configs = [(file, pairs, load_config(file, pairs)) for file in files for pairs in points]
    chosen = [[pair for pair in pairs if pair not in overrides] for _, pairs, _ in configs]
    names = [
        "-".join([config.run_name, *map(_as_name, pairs)]) for (*_, config), pairs in zip(configs, chosen, strict=True)
    ]
    described = [" ".join(pairs) for pairs in chosen]
    for i, (name, point, (*_, config)) in enumerate(zip(names, described, configs, strict=True)):
        start = i - i % len(points)  # the first of the same file
        if any(config == same for *_, same in configs[start:i]):
            raise ConfigError(f"command line: {point} is the same run as other values before it; remove it")
        if name in names[start:i]:
            both = f"{described[names.index(name, start)]} and {point}"
            raise ConfigError(f"run_name: {name!r} is the name of {both}; train one of them in a command of its own")
        if name in names[:start]:
            raise ConfigError(f"run_name: {name!r} is the name of two files; give each a name of its own")
    group = "-".join(dict.fromkeys(config.run_name for *_, config in configs))[:128]  # W&B's limit
    runs = []
    for (file, pairs, config), base, point in zip(configs, names, described, strict=True):
        common = [*pairs]
        if config.loggers.wandb is not None and config.loggers.wandb.group is None:
            common.append(f"loggers.wandb.group={group}")
        inputs = inputs_of(config)
        for seed in seeds:
            values = [*common, f"seed={seed}", f"run_name={base}-seed{seed}"]
            seeded = load_config(file, values)
            folder = Path(seeded.runs_folder) / seeded.run_name
            runs.append(Run(file, point, base, seed, seeded, folder, ["-f", file, *values], inputs))
    return runs


def _as_name(pair: str) -> str:
    """``lr_1e-5`` for ``optimizer.lr=1e-5``, as a part of a file's name."""
    key, _, text = pair.partition("=")
    return re.sub(r"[^A-Za-z0-9.-]+", "_", f"{key.rpartition('.')[2]}_{text}").strip("_")


def gpus_of_processes(runs: Sequence[Run], processes: int | None) -> list[str | None]:
    """The GPU of each process that trains at the same time, found without importing torch; None if there is none."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if all(run.config.trainer.device == "cpu" for run in runs):
        names = ""
    elif names is None:
        uuids = command_output("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", timeout=60)
        names = (uuids or "").replace("\n", ",")
    gpus: list[str | None] = [name.strip() for name in names.split(",") if name.strip()] or [None]
    return [gpus[i % len(gpus)] for i in range(processes or len(gpus))]


def _train_all(runs: Sequence[Run], gpus: Sequence[str | None], program: str, metric: str | None) -> list[str]:
    """Train the unfinished runs, one at a time on each of ``gpus``, and return a line for each failure. A finished run
    without the metric stops the others; a refused run stops those that would be refused for the same reason."""
    refused = defaultdict[tuple[str, str], list[Run]](list)  # by file and reason
    waiting, free, failures = [run for run in runs if not run.finished(metric)], [*gpus], list[str]()
    print(f"{len(waiting)} of {len(runs)} runs are not finished; training {len(free)} at a time", flush=True)
    # The logs are next to the folders, which train.py may rename.
    by_log = {Path(f"{run.folder}.log"): run for run in waiting}

    def jobs() -> Iterator[Job]:
        for log, run in by_log.items():
            for (file, _), refused_runs in refused.items():
                points = {other.point for other in refused_runs}  # two values refused alike: neither is the cause
                if run.file == file and (run.point in points or len(points) > 1):
                    failures.append(f"{log.stem}: not started; it would be refused like {refused_runs[0].folder.name}")
                    print(failures[-1], flush=True)
                    break
            else:
                yield Job(run.arguments, log, program=program)

    def start(job: Job) -> Process:
        if gpu := free.pop(0):
            job = dataclasses.replace(job, environment={"CUDA_VISIBLE_DEVICES": gpu})
        print(f"{job.log.stem}: started{f' on GPU {gpu}' if gpu else ''}", flush=True)
        return Process(job)

    def done(job: Job, ended: Ended) -> None:
        free.append(job.environment.get("CUDA_VISIBLE_DEVICES"))
        reason = ended.reason
        if not reason and not by_log[job.log].finished(metric):
            reason = "its data or config changed while the command ran; start again"
        if reason:
            failures.append(f"{job.log.stem}: {reason}")
        if ended.kind == "refused" and job.log.stem not in reason:  # which another run would not have
            refused[by_log[job.log].file, reason].append(by_log[job.log])
        print(f"{job.log.stem}: {reason or 'finished'}", flush=True)

    run_all(jobs(), len(gpus), done, start)
    return failures


def table(runs: Sequence[Run]) -> str:
    """Mean and standard deviation (of a sample, n - 1) of each metric of the last evaluation, as Markdown."""
    rows = []
    for base in dict.fromkeys(run.base for run in runs):
        reports = {run.seed: run.metrics() for run in runs if run.base == base}
        finished = [metrics for metrics in reports.values() if metrics is not None]
        for name in dict.fromkeys(n for metrics in finished for n in metrics):
            values = [value for metrics in finished if (value := metrics.get(name)) is not None]  # null stands for NaN
            mean = f"{statistics.mean(values):.4f}" if values else ""
            deviation = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
            rows.append([base, name, f"{len(values)} of {len(reports)}", mean, deviation])
        if missing := ", ".join(str(seed) for seed, metrics in reports.items() if metrics is None):
            rows.append([base, f"failed: seed {missing}"])
    columns = ["run_name", "metric", "runs", "mean", "standard deviation"]
    return tabulate(rows, columns, tablefmt="github", disable_numparse=True)


def best_of(runs: Sequence[Run], metric: str | None) -> list[str]:
    """A line for each file that was trained with several values: those with the best mean of a metric."""
    lines = []
    for file in dict.fromkeys(run.file for run in runs if run.point):
        finished = [(run, metrics) for run in runs if run.file == file and (metrics := run.metrics()) is not None]
        chosen = next(run.config.checkpoint.best for run in runs if run.file == file)
        known = dict.fromkeys(name for _, metrics in finished for name in metrics)
        if not known:
            continue
        name = _reported(metric or (chosen.metric if chosen else next(iter(known))), known)
        values = defaultdict[str, list[float]](list)
        for run, metrics in finished:
            if (value := metrics.get(name)) is not None:
                values[run.point].append(value)
        if not values:
            missing = f"no run has the metric {name!r}; they have: {', '.join(known)}"
            lines.append(f"{Path(file).stem}: {f'{name} is undefined in every run' if name in known else missing}")
            continue
        means = {point: statistics.mean(found) for point, found in values.items()}
        mode = chosen.mode if chosen and _reported(chosen.metric, known) == name else None
        smallest = mode == "min" if mode else smaller_is_better(name)
        first, *others = sorted(means, key=means.__getitem__, reverse=not smallest)
        best, lead = means[first], abs(means[first] - means[others[0]]) if others else 0.0
        spreads = [statistics.stdev(values[p]) for p in (first, *others[:1]) if len(values[p]) > 1]
        deviation = max(spreads, default=0.0)
        within = f"; its lead of {lead:.4f} over the next is within the standard deviation ({deviation:.4f})"
        said = within if 0 < lead <= deviation else ""
        counts = {p: f"mean of {len(found)} runs" if len(found) > 1 else "1 run" for p, found in values.items()}
        points = [f"{point} ({counts[point]})" for point, mean in means.items() if mean == best]
        lines.append(f"{Path(file).stem}: best {name} {best:.4f} with {' and '.join(points)}{said}")
    return lines


def _reported(metric: str, known: Container[str]) -> str:
    """A metric's name in report.json, also of one that is called as in loggers."""
    if metric in known:
        return metric
    from composer_speedups.tasks.metrics import reported_name  # imports torchmetrics, which takes seconds

    return reported_name(metric)


def main(arguments: Sequence[str], program: str = TRAIN) -> None:
    """Train the runs that have not finished, and print the table of all; ``program`` is the module that trains."""
    usage = f"{_USAGE}{keys_help(RepeatConfig)}\n\nAll other keys are those of composer train.py --help."
    command_line = parse_command_line(arguments, several_files=True, help=lambda: usage)
    own = [pair for pair in command_line.overrides if pair.partition("=")[0] in fields_of(RepeatConfig)]
    settings, _ = read_settings(RepeatConfig, own)
    overrides = [pair for pair in command_line.overrides if pair not in own]
    runs = planned_runs(command_line.files, overrides, settings.seeds)
    if settings.metric and not any(run.point for run in runs):
        raise ConfigError("command line: metric names the best of several values, and no key has a list; remove it")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("WORLD_SIZE: each run is one process; start this command without a launcher")
    with contextlib.ExitStack() as locks:  # otherwise a second command would train finished seeds again
        for run in runs:
            lock = make_folder(run.folder.parent, "runs_folder") / f".{run.folder.name}.repeat.lock"
            locks.enter_context(lock_file(lock, "runs_folder"))
        failures = _train_all(runs, gpus_of_processes(runs, settings.processes), program, settings.metric)
        print("\n".join([table(runs), *best_of(runs, settings.metric)]), flush=True)
    if failures:
        raise RunFailedError(f"{len(failures)} of {len(runs)} runs failed; the first: {failures[0]}")


def command() -> None:
    """Entry point of the console command."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    with exit_codes("repeat"):
        main(sys.argv[1:])
