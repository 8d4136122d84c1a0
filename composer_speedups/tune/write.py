"""The tuned YAML: the given keys, the chosen techniques, and in comments what was measured and why."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from composer_speedups.core.files import write_atomically
from composer_speedups.train.config.load import load_config
from composer_speedups.tune.explain import left_out, measured_reasons
from composer_speedups.tune.output import MARK
from composer_speedups.tune.results import Result, plain

__all__ = ["log_of", "tuned_yaml", "write_tuned"]


def write_tuned(
    path: Path, file: str, overrides: Sequence[str], result: Result, environment: dict[str, Any], budget: float
) -> None:
    """Write the YAML, and beside it all trials as .json; either appears whole or not at all.

    The YAML is read back first: its config must be the given one but for the techniques.
    """
    text = tuned_yaml(file, overrides, result, environment, budget, path.name)
    given, log = load_config(file, overrides), path.with_suffix(".json")
    write_atomically(log, json.dumps(log_of(result, environment, budget), indent=2) + "\n")
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_atomically(partial, text)
        assert load_config(partial) == dataclasses.replace(given, algorithms=plain(result.chosen))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def tuned_yaml(
    file: str, overrides: Sequence[str], result: Result, environment: dict[str, Any], budget: float, name: str
) -> str:
    """The text of the YAML. Values that the given file takes from the environment go on being taken from there."""
    raw = OmegaConf.load(file)
    for override in overrides:
        if override.split("=")[0].split(".")[0] != "algorithms":
            raw.merge_with_dotlist([override])
    content = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(content, dict)
    content.pop("algorithms", None)
    lines = [*_wrapped(_header(file, overrides, result, environment, budget, name))]
    if content:
        lines += ["", OmegaConf.to_yaml(OmegaConf.create(content)).rstrip()]
    lines += ["", *_algorithms(result)]
    missing = left_out(result)
    if missing:
        lines += ["", "# Left out:", *_wrapped(f"- {label}: {reason}" for label, reason in missing)]
    if result.sizes:
        lines += ["", "# Batch sizes with these techniques. Another size is another recipe, and wants its own rate:"]
        lines += _wrapped(f"- {size}: {_size(outcome)}" for size, outcome in result.sizes.items())
    return "\n".join(lines) + "\n"


def _header(
    file: str, overrides: Sequence[str], result: Result, environment: dict[str, Any], budget: float, name: str
) -> Iterator[str]:
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    yield f"{MARK[2:]} on {date} from {file}{' with ' if overrides else ''}{' '.join(overrides)}"
    yield f"Train with: composer train.py -f {name}. All trials: {Path(name).with_suffix('.json')}"
    machine = environment["gpu"] or f"{environment['cpu']}, {environment['cpu_count']} cores, no GPU"
    versions = ", ".join(f"{k} {environment[k]}" for k in ("torch", "composer", "transformers"))
    yield f"Measured on: {machine}; {versions}; commit {environment['commit']}"
    yield (
        f"{len(result.trials)} trials of {result.trial_steps} steps in {result.seconds:.0f} s of {budget:g} s; one "
        f"process each, compile caches empty"
    )
    step = result.typical.step_seconds * 1000
    yield (
        f"Planned run: {result.planned_steps} steps. The given YAML takes {result.base_seconds:,.1f} s of training for "
        f"them ({step:.1f} ms a step), give or take {result.noise:,.1f} s: less does not count. "
        "Imports, data, evaluations and checkpoints are not in these times."
    )
    if result.kept_given is not None:
        yield f"The given techniques were kept: {result.kept_given}."
    elif result.speedup is not None:
        given, chosen = (", ".join(f"{s:,.1f}" for s in times) for times in zip(*result.pairs, strict=True))
        yield f"Chosen: {result.speedup:.2f} times as fast. Run in turn: given {given} s, chosen {chosen} s."


def _algorithms(result: Result) -> Iterator[str]:
    if not result.chosen:
        yield "algorithms: {}"
        return
    yield "algorithms:"
    reasons = measured_reasons(result)
    for name, settings in plain(result.chosen).items():
        for reason in reasons.get(name, ()):
            yield from (f"  {line}" for line in _wrapped([reason]))
        yield textwrap.indent(OmegaConf.to_yaml(OmegaConf.create({name: settings})).rstrip(), "  ")


def _size(outcome: Any) -> str:
    if not outcome.ok:
        return str(outcome.reason)
    memory = f", {outcome.peak_gib:.1f} GiB at most" if outcome.peak_gib is not None else ""
    return f"{outcome.samples_per_sec:,.0f} samples/s{memory}"


def _wrapped(texts: Any) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(
            " ".join(str(text).split()), 116, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
        )


def log_of(result: Result, environment: dict[str, Any], budget: float) -> dict[str, Any]:
    """All trials and verdicts, as JSON has them: what is no finite number is null."""
    content = dataclasses.asdict(result) | {"speedup": result.speedup}
    cleaned: dict[str, Any] = _json({"environment": environment, "budget_seconds": budget, **content})
    return cleaned


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)
