"""Results in words: why each chosen technique is in, and why each other one is not."""

from __future__ import annotations

from composer_speedups.tune.changes import key_of
from composer_speedups.tune.outcomes import Outcome, break_even_steps
from composer_speedups.tune.results import Result, Verdict

__all__ = ["left_out", "measured_reasons"]

_KINDS = {
    "exact": "exact",
    "rounding": "exact up to rounding",
    "lower_precision": "computes in less than float32",
    "recipe": "another training recipe",
}


def measured_reasons(result: Result) -> dict[str, list[str]]:
    """Technique of the chosen set → its comments."""
    reasons: dict[str, list[str]] = {}
    for name, settings in result.chosen.items():
        own = ["in the given YAML" if result.given.get(name) == settings else ""]
        if (without := _without(name, result)) is not None:
            seconds, outcome = without
            own.append(f"the given YAML without it takes {seconds:,.1f} s{_pays(outcome, result.typical)}")
        for verdict in result.verdicts:
            adds = verdict.candidate.adds
            if name in adds and dict(adds[name]) == dict(settings or {}) and verdict.state == "measured":
                own += [_measured(verdict, result), _KINDS[verdict.candidate.kind]] if len(adds) == 1 else []
                own += [f"as part of {verdict.candidate.label}: {_measured(verdict, result)}"] if len(adds) > 1 else []
        marginal = result.without.get(name)
        if isinstance(marginal, float):
            own.append(f"the set without it takes {marginal:,.1f} s")
        elif marginal is not None:
            own.append(f"the set without it is not possible: {marginal}")
        reasons[name] = ["; ".join(part for part in own if part)]
    return {name: texts for name, texts in reasons.items() if texts != [""]}


def _without(name: str, result: Result) -> tuple[float, Outcome] | None:
    """Planned seconds and outcome of the given YAML without one of its techniques, where that was measured."""
    for verdict in result.verdicts:
        seconds, outcome = verdict.alone_seconds, verdict.alone
        if verdict.candidate.removes == (name,) and seconds is not None and outcome is not None:
            return seconds, outcome
    return None


def left_out(result: Result) -> list[tuple[str, str]]:
    """Label and reason of all that is not in the chosen set."""
    lines = [(name, f"in the given YAML, but not in force here: {why}") for name, why in result.unengaged.items()]
    for name in result.given:
        if name not in result.chosen:
            lines.append((name, _removed(name, result)))
    for verdict in result.verdicts:
        candidate = verdict.candidate
        if candidate.removes or _is_in(verdict, result) or verdict.reason == "already in the set":
            continue
        if verdict.state == "measured":
            lines.append((candidate.label, _measured(verdict, result)))
        else:  # "NAME: why" of a technique itself
            own = candidate.label.split(" ")[0]
            lines.append((candidate.label, verdict.reason.removeprefix(f"{own}: ")))
    lines += [(name, f"not tried: {why}") for name, why in result.never.items() if name not in result.chosen]
    return _by_reason(lines)


def _by_reason(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One line for all labels with the same reason."""
    labels: dict[str, list[str]] = {}
    for label, reason in lines:
        labels.setdefault(reason, []).append(label)
    return [(", ".join(names), reason) for reason, names in labels.items()]


def _is_in(verdict: Verdict, result: Result) -> bool:
    both = {**result.chosen, **{n: dict(s) for n, s in verdict.candidate.adds.items()}}
    return key_of(both) == key_of(result.chosen)


def _removed(name: str, result: Result) -> str:
    without = _without(name, result)
    if without is None:
        return "in the given YAML, and displaced by a chosen technique that it cannot go with"
    seconds, outcome = without
    return f"in the given YAML, which takes {seconds:,.1f} s without it{_pays(outcome, result.typical)}"


def _measured(verdict: Verdict, result: Result) -> str:
    """What a candidate gave alone and on top of others."""
    parts = []
    if verdict.alone is not None and verdict.alone_seconds is not None:
        base = result.typical
        ratio = result.base_seconds / verdict.alone_seconds
        parts.append(f"alone {ratio:.2f} times as fast, {verdict.alone_seconds:,.1f} s{_pays(base, verdict.alone)}")
    if verdict.stacked is not None and verdict.stacked != (result.base_seconds, verdict.alone_seconds):
        before, after = verdict.stacked
        parts.append(f"on top of what was chosen by then {after:,.1f} s after {before:,.1f} s")
    elif verdict.reason:
        parts.append(f"on top of what was chosen by then: {verdict.reason}")
    return ", ".join(parts)


def _pays(base: Outcome, other: Outcome) -> str:
    """``other`` beside ``base``: what its start costs and when that is made up for."""
    extra = other.start_seconds - base.start_seconds
    before, after = base.step_seconds * 1e3, other.step_seconds * 1e3
    said = f" (start {round(extra, 1) + 0.0:+.1f} s, step {before:.1f} → {after:.1f} ms"
    steps = break_even_steps(base, other)
    if steps is None:
        return f"{said}: never pays)"
    return f"{said}: pays from step {steps:,})" if steps else f"{said})"
