"""Write the tuned YAML: the original keys, the fastest set, and comments with what was measured."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tabulate import tabulate

from composer_speedups.core.files import write_atomically, write_json
from composer_speedups.sweep.search import Result
from composer_speedups.sweep.settings import FIRST_LINE_START
from composer_speedups.sweep.trials import Trial, break_even_steps
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config

_COLUMNS = ("set", "planned run", "as fast", "step", "start", "pays off from step", "peak memory")


def write_tuned(
    path: Path,
    file: str,
    overrides: Sequence[str],
    config: Config,
    result: Result,
    environment: Mapping[str, Any],
    budget: float,
) -> None:
    """Write the YAML, and all trials as .json next to it, both atomically.

    The YAML is read back before it is published: its config must equal the original one except for the techniques.

    Args:
        path: The YAML.
        file: The original YAML.
        overrides: ``key=value`` pairs given with it on the command line.
        config: The config that both describe.
        result: The result of the search.
        environment: The ``environment`` section of a run's report.
        budget: Seconds that the search was allowed.
    """
    algorithms = dict(config.algorithms if result.chosen is None else result.chosen.algorithms)
    not_measured: dict[str, list[str]] = {}
    for trial in result.trials:
        if not trial.ok:
            not_measured.setdefault(trial.reason, []).append(trial.label)
    comments = [
        *_wrapped(_header(path.name, file, overrides, result, environment, budget)),
        *(f"# {line}" for line in table_of(result).splitlines()),
        *_wrapped(f"Not measured: {'; '.join(labels)}: {why}" for why, labels in not_measured.items()),
    ]
    parts = ["\n".join(comments), _original_keys(file, overrides), OmegaConf.to_yaml({"algorithms": algorithms})]
    log = {"environment": environment, "budget_seconds": budget, **dataclasses.asdict(result)}
    write_json(path.with_suffix(".json"), {**log, "speedup": result.speedup, "algorithms": algorithms})
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_atomically(partial, "\n\n".join(part.rstrip() for part in parts if part) + "\n")
        assert load_config(partial) == config.replaced(algorithms=algorithms)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _header(
    name: str, file: str, overrides: Sequence[str], result: Result, environment: Mapping[str, Any], budget: float
) -> Iterator[str]:
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    yield f"{FIRST_LINE_START[2:]} on {date} from {file}{' with ' if overrides else ''}{' '.join(overrides)}"
    yield f"Train with: composer train.py -f {name}. All trials: {Path(name).with_suffix('.json')}"
    machine = environment["gpu"] or f"{environment['cpu']}, {environment['cpu_count']} cores, no GPU"
    versions = ", ".join(f"{k} {environment[k]}" for k in ("torch", "composer", "transformers"))
    yield f"Measured on: {machine}; {versions}; commit {environment['commit']}"
    tried = len([trial for trial in result.trials if trial.status not in ("untried", "refused")])
    yield (
        f"Sets tried: {tried}, in {result.seconds:.0f} s of {budget:g} s; each for {result.trial_steps} steps in a "
        "process of its own with empty compile caches."
    )
    yield (
        f"Planned run: {result.planned_steps} steps, without imports, data, evaluations and checkpoints. Differences "
        f"below {result.noise:,.1f} s count as noise. A set pays off once its faster steps have made up for its start."
    )
    if result.chosen is None:
        yield f"The original techniques were kept: {result.kept_original}."
    else:
        original, chosen = (", ".join(f"{seconds:,.1f}" for seconds in times) for times in result.again())
        yield f"Chosen: {result.chosen.label}, {result.speedup:.2f} times as fast."
        yield f"Run in turns: original {original} s, chosen {chosen} s."


def table_of(result: Result) -> str:
    """The measured sets, the fastest first, in comparison with the original one."""
    base = result.original
    measured = sorted((trial for trial in result.trials if trial.ok), key=result.planned)

    def row(trial: Trial) -> list[str]:
        steps = break_even_steps(base, trial)
        memory = "" if trial.peak_gib is None else f"{trial.peak_gib:.1f} GiB"
        planned = result.planned(trial)
        times = [
            f"{planned:,.1f} s",
            f"{result.planned(base) / planned:.2f}×",
            f"{trial.step_seconds * 1e3:.1f} ms",
        ]
        pays = "" if trial is base else "never" if steps is None else f"{steps:,}"
        return [trial.label, *times, f"{trial.start_seconds:.1f} s", pays, memory]

    return tabulate([row(trial) for trial in (base, *measured)], _COLUMNS, tablefmt="github", disable_numparse=True)


def _original_keys(file: str, overrides: Sequence[str]) -> str:
    """All keys except the techniques. Values that the original file takes from the environment stay interpolations."""
    raw = OmegaConf.load(file)
    assert isinstance(raw, DictConfig), "the original file was read before"
    raw.merge_with_dotlist([o for o in overrides if o.split("=")[0].split(".")[0] != "algorithms"])
    raw.pop("algorithms", None)
    return OmegaConf.to_yaml(raw) if raw else ""


def _wrapped(texts: Iterable[str]) -> Iterator[str]:
    """Each text as a comment of its own."""
    for text in texts:
        yield from textwrap.wrap(
            " ".join(text.split()), 116, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
        )
