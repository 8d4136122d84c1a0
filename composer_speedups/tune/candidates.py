"""The candidates that tune tries, as declared by the techniques' classes, and adding one to a set of techniques."""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_speedups.core.catalogue import technique_names
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.registry import build_techniques, technique_class
from composer_speedups.core.technique import Exactness, Technique, refuse_conflicts
from composer_speedups.recommendation import RECOMMENDED

__all__ = [
    "KINDS",
    "Algorithms",
    "Candidate",
    "Refused",
    "apply_candidate",
    "candidates_for",
    "forbidden",
    "key_of",
    "kind_of",
    "least_exact",
    "stopping",
]

Algorithms = Mapping[str, Mapping[str, Any]]
"""YAML name → settings, as in a config."""

KINDS: tuple[Exactness, ...] = typing.get_args(Exactness)


@dataclass(frozen=True)
class Candidate:
    """A change of the ``algorithms`` section."""

    label: str  # name in tables and comments
    adds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # techniques added, or set to other values
    removes: tuple[str, ...] = ()
    kind: Exactness = "exact"  # the least exact of its techniques
    fallback_of: str | None = None  # label of the candidate that must be refused before this one is tried
    gain: float = 1.0  # expected speedup


def candidates_for(original: Mapping[str, Any], device: str, *, autocast_by_config: bool = False) -> list[Candidate]:
    """All candidates for an original ``algorithms`` section, in the order of their trials.

    The recommended set comes first, then single techniques by expected gain, in case the time runs out, then the
    original set without each one of its techniques.

    Args:
        original: YAML name → settings.
        device: ``cpu`` or ``cuda``.
        autocast_by_config: ``trainer.precision`` is already 16-bit, so ``mixed_precision`` would change nothing.
    """
    omitted = {"mixed_precision"} if autocast_by_config else set()
    whole = {name: settings for name, settings in RECOMMENDED.items() if name not in omitted}
    kind = least_exact(*(kind_of(name, settings, device) for name, settings in whole.items()))
    singles = [c for name in technique_names() if name not in omitted for c in _variants(technique_class(name), device)]
    singles.sort(key=lambda candidate: -candidate.gain)
    removable = [name for name in original if kind_of(name, original[name], device) != "recipe"]
    return [
        Candidate("the recommended set", whole, kind=kind),
        *singles,
        *(Candidate(f"without {name}", removes=(name,)) for name in removable),
    ]


def _variants(technique: type[Technique], device: str) -> Iterator[Candidate]:
    name, before = technique.name, None
    for variant in technique.trials:
        if variant.device not in (None, device):
            continue
        notes: list[str] = [] if technique.purpose == "saves time" else [technique.purpose]
        notes += [f"{k}: {v}".lower() for k, v in variant.settings.items() if k != "allow_cpu"]
        label = f"{name} ({', '.join(notes)})" if notes else name
        label += "".join(f" with {other}" for other in variant.with_techniques)
        adds = {**variant.with_techniques, name: variant.settings}
        kind = least_exact(*(kind_of(n, s, device) for n, s in adds.items()))
        gain = technique.gain if variant.gain is None else variant.gain
        yield Candidate(label, adds, kind=kind, fallback_of=before if variant.fallback else None, gain=gain)
        before = label


def kind_of(name: str, settings: Mapping[str, Any] | None, device: str | None = None) -> Exactness:
    """The exactness of a technique with these settings; without a device, the least exact over all devices."""
    return technique_class(name).exactness_with(settings or {}, device)


def least_exact(*kinds: Exactness) -> Exactness:
    """The least exact of several kinds."""
    return max(kinds, key=KINDS.index)


class Refused(Exception):
    """A candidate is not tried; the message is the reason."""


def apply_candidate(candidate: Candidate, current: Algorithms) -> dict[str, Any]:
    """``current`` with the candidate's techniques, and without those that conflict with them.

    A technique that the candidate names without settings keeps its current ones.

    Raises:
        Refused: Nothing would change, or a conflicting technique is part of the recipe.
    """
    changed = {n: s for n, s in current.items() if n not in candidate.removes} | {
        n: dict(s) for n, s in candidate.adds.items() if s or n not in current
    }
    added = build_techniques(stopping({n: changed[n] for n in candidate.adds}))
    for other in build_techniques(stopping(current)):
        if other.name in candidate.adds or other.name in candidate.removes:
            continue
        reason = next((reason for one in added if (reason := _conflict_reason(one, other))), None)
        if reason is None:
            continue
        if kind_of(other.name, current[other.name]) == "recipe":
            raise Refused(f"{reason}; {other.name} is part of the recipe and stays")
        del changed[other.name]
    if key_of(changed) == key_of(current):
        raise Refused("already in the set")
    return changed


def _conflict_reason(one: Technique, other: Technique) -> str | None:
    try:
        refuse_conflicts([one, other])
    except TechniqueError as error:
        return f"{error.technique}: {error.reason}"
    return None


def forbidden(kind: Exactness, allow: Collection[str]) -> str | None:
    """Why a candidate of this kind may not be tried; None if it may."""
    if kind in ("exact", "rounding") or kind in allow:
        return None
    what = "computes in less than float32" if kind == "lower_precision" else "changes the training recipe"
    allowed = ", ".join([*sorted(allow), kind])
    return f"{what}, which is not allowed; tune.allow=[{allowed}] allows it"


def key_of(algorithms: Algorithms) -> tuple[str, ...]:
    """A key that is equal for sets that train identically, independent of order and of explicit defaults."""
    return tuple(sorted(map(repr, build_techniques(stopping(algorithms)))))


def stopping(algorithms: Algorithms) -> dict[str, Any]:
    """The same techniques without ``on_unavailable``, so that a technique that cannot engage raises."""
    return {n: {k: v for k, v in settings.items() if k != "on_unavailable"} for n, settings in algorithms.items()}
