"""Write the tuned YAML: the original keys, the chosen techniques, and comments with measurements and reasons."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from composer_speedups.core.files import write_atomically, write_json
from composer_speedups.train.config.load import load_config
from composer_speedups.tune.candidates import key_of
from composer_speedups.tune.results import Outcome, Result, Verdict, break_even_steps
from composer_speedups.tune.settings import FIRST_LINE_START

__all__ = ["write_tuned"]

_KINDS = {
    "exact": "exact",
    "rounding": "exact up to rounding",
    "lower_precision": "computes in less than float32",
    "recipe": "another training recipe",
}


def write_tuned(
    path: Path, file: str, overrides: Sequence[str], result: Result, environment: Mapping[str, Any], budget: float
) -> None:
    """Write the YAML, and all trials as .json next to it, both atomically.

    The YAML is read back before it is published: its config must equal the original one except for the techniques.

    Args:
        path: The YAML.
        file: The original YAML.
        overrides: ``key=value`` pairs given with it on the command line.
        result: The result of the search.
        environment: The ``environment`` section of a run's report.
        budget: Seconds that the search was allowed.
    """
    original = load_config(file, overrides)
    sizes = "# Batch sizes with these techniques. Another size is another recipe, and wants its own rate:"
    parts = [
        _comments(_header(path.name, file, overrides, result, environment, budget)),
        _original_keys(file, overrides),
        _chosen(result),
        _comments(_left_out(result), "# Left out:"),
        _comments(_sizes(result), sizes),
    ]
    log = {"environment": environment, "budget_seconds": budget, **dataclasses.asdict(result)}
    write_json(path.with_suffix(".json"), {**log, "speedup": result.speedup})
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_atomically(partial, "\n\n".join(part for part in parts if part) + "\n")
        assert load_config(partial) == dataclasses.replace(original, algorithms=result.chosen)
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
    yield (
        f"{len(result.trials)} trials of {result.trial_steps} steps in {result.seconds:.0f} s of {budget:g} s; one "
        f"process each, compile caches empty"
    )
    step = result.typical.step_seconds * 1000
    yield (
        f"Planned run: {result.planned_steps} steps. The original YAML takes {result.base_seconds:,.1f} s of training "
        f"for them ({step:.1f} ms per step); differences below {result.noise:,.1f} s count as noise. "
        "Imports, data, evaluations and checkpoints are not included."
    )
    if result.kept_original is not None:
        yield f"The original techniques were kept: {result.kept_original}."
    elif result.speedup is not None:
        original, chosen = (", ".join(f"{s:,.1f}" for s in times) for times in zip(*result.pairs, strict=True))
        yield f"Chosen: {result.speedup:.2f} times as fast. Run in turn: original {original} s, chosen {chosen} s."


def _original_keys(file: str, overrides: Sequence[str]) -> str:
    """All keys except the techniques. Values that the original file takes from the environment stay interpolations."""
    raw = OmegaConf.load(file)
    assert isinstance(raw, DictConfig), "the original file was read before"
    raw.merge_with_dotlist([o for o in overrides if o.split("=")[0].split(".")[0] != "algorithms"])
    raw.pop("algorithms", None)
    return OmegaConf.to_yaml(raw).rstrip() if raw else ""


def _chosen(result: Result) -> str:
    """The ``algorithms`` section, with the measurements above each technique."""
    lines = []
    for name, settings in result.chosen.items():
        if reason := "; ".join(_reasons(name, settings, result)):
            lines.append(textwrap.indent(_comments([reason]), "  "))
        lines.append(textwrap.indent(OmegaConf.to_yaml(OmegaConf.create({name: settings})).rstrip(), "  "))
    return "\n".join(["algorithms:" if lines else "algorithms: {}", *lines])


def _reasons(name: str, settings: Mapping[str, Any], result: Result) -> Iterator[str]:
    """Why a technique is in the chosen set."""
    if result.original.get(name) == settings:
        yield "in the original YAML"
    if without := _without(name, result):
        yield "the original YAML without it takes {}{}".format(*without)
    for verdict in result.verdicts:
        candidate = verdict.candidate
        if candidate.adds.get(name) != settings or verdict.state != "measured":
            continue
        if len(candidate.adds) > 1:
            yield f"as part of {candidate.label}: {_measured(verdict, result)}"
        else:
            yield f"{_measured(verdict, result)}; {_KINDS[candidate.kind]}"
    within = result.without.get(name)
    if isinstance(within, float):
        yield f"the set without it takes {within:,.1f} s"
    elif within is not None:
        yield f"the set without it is not possible: {within}"


def _left_out(result: Result) -> list[str]:
    """The techniques that are not in the chosen set, with reasons; one line per reason."""
    labels: dict[str, list[str]] = {}
    for name, why in result.unengaged.items():
        labels.setdefault(f"in the original YAML, but cannot engage here: {why}", []).append(name)
    for name in (name for name in result.original if name not in result.chosen):
        why = "and displaced by a chosen technique that conflicts with it"
        if without := _without(name, result):
            why = "which takes {} without it{}".format(*without)
        labels.setdefault(f"in the original YAML, {why}", []).append(name)
    for verdict in result.verdicts:
        candidate = verdict.candidate
        if candidate.removes or verdict.reason == "already in the set":
            continue
        if key_of({**result.chosen, **candidate.adds}) == key_of(result.chosen):
            continue
        own = candidate.label.split(" ")[0]  # refusals begin with the technique's "NAME: "
        why = _measured(verdict, result) if verdict.state == "measured" else verdict.reason.removeprefix(f"{own}: ")
        labels.setdefault(why, []).append(candidate.label)
    for name, why in result.never.items():
        if name not in result.chosen:
            labels.setdefault(f"not tried: {why}", []).append(name)
    return [f"- {', '.join(names)}: {reason}" for reason, names in labels.items()]


def _sizes(result: Result) -> Iterator[str]:
    for size, outcome in result.sizes.items():
        memory = f", {outcome.peak_gib:.1f} GiB at most" if outcome.peak_gib is not None else ""
        measured = f"{outcome.samples_per_sec:,.0f} samples/s{memory}" if outcome.ok else outcome.reason
        yield f"- {size}: {measured}"


def _without(name: str, result: Result) -> tuple[str, str] | None:
    """The original YAML's time without one of its techniques, and when that technique pays off, if it was measured."""
    for verdict in result.verdicts:
        if verdict.candidate.removes == (name,) and verdict.alone is not None and verdict.alone_seconds is not None:
            return f"{verdict.alone_seconds:,.1f} s", _pays(verdict.alone, result.typical)
    return None


def _measured(verdict: Verdict, result: Result) -> str:
    """A candidate's times when added to the original set and to the set chosen so far."""
    parts = []
    if verdict.alone is not None and verdict.alone_seconds is not None:
        ratio, pays = result.base_seconds / verdict.alone_seconds, _pays(result.typical, verdict.alone)
        parts.append(f"alone {ratio:.2f} times as fast, {verdict.alone_seconds:,.1f} s{pays}")
    if verdict.stacked is not None and verdict.stacked != (result.base_seconds, verdict.alone_seconds):
        before, after = verdict.stacked
        parts.append(f"added to the set chosen so far, {after:,.1f} s instead of {before:,.1f} s")
    elif verdict.reason:
        parts.append(f"added to the set chosen so far: {verdict.reason}")
    return ", ".join(parts)


def _pays(base: Outcome, other: Outcome) -> str:
    """Compare ``other`` with ``base``: what its start costs, and after how many steps that is recovered."""
    extra = other.start_seconds - base.start_seconds
    before, after = base.step_seconds * 1e3, other.step_seconds * 1e3
    steps = break_even_steps(base, other)
    pays = ": never pays" if steps is None else f": pays off from step {steps:,}" if steps else ""
    return f" (start {round(extra, 1) + 0.0:+.1f} s, step {before:.1f} → {after:.1f} ms{pays})"


def _comments(texts: Iterable[str], title: str = "") -> str:
    """Each text as a separate comment below the title; empty without texts."""
    lines = []
    for text in texts:
        lines += textwrap.wrap(
            " ".join(text.split()), 116, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
        )
    return "\n".join([title, *lines] if title and lines else lines)
