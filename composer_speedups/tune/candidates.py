"""What there is to try, as each technique's class states it, and what putting one on a set of techniques does."""

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
from composer_speedups.tune.results import Algorithms

__all__ = [
    "KINDS",
    "Candidate",
    "Refused",
    "apply_candidate",
    "candidates_for",
    "forbidden",
    "key_of",
    "kind_of",
    "stopping",
    "worst",
]

KINDS: tuple[Exactness, ...] = typing.get_args(Exactness)


@dataclass(frozen=True)
class Candidate:
    """A change of the ``algorithms`` section."""

    label: str  # in tables and comments
    adds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # techniques added, or set to other values
    removes: tuple[str, ...] = ()
    kind: Exactness = "exact"  # the most that it does to the numbers
    fallback_of: str | None = None  # label of the candidate whose refusal this one waits for
    gain: float = 1.0  # expected samples/s with it over those without it


def candidates_for(original: Mapping[str, Any], device: str, *, autocast_by_config: bool = False) -> list[Candidate]:
    """All candidates beside an original ``algorithms`` section, in the order of their trials.

    That is the recommended set, then single techniques by expected gain, in case the time runs out, then the original
    set without one of its own.

    Args:
        original: YAML name → settings.
        device: ``cpu`` or ``cuda``.
        autocast_by_config: ``trainer.precision`` is 16-bit already, and ``mixed_precision`` has nothing to add.
    """
    left = {"mixed_precision"} if autocast_by_config else set()
    whole = {name: settings for name, settings in RECOMMENDED.items() if name not in left}
    kind = worst(*(kind_of(name, settings, device) for name, settings in whole.items()))
    singles = [c for name in technique_names() if name not in left for c in _variants(technique_class(name), device)]
    singles.sort(key=lambda candidate: -candidate.gain)
    taken_out = [name for name in original if kind_of(name, original[name], device) != "recipe"]
    return [
        Candidate("the recommended set", whole, kind=kind),
        *singles,
        *(Candidate(f"without {name}", removes=(name,)) for name in taken_out),
    ]


def _variants(technique: type[Technique], device: str) -> Iterator[Candidate]:
    name, before = technique.name, None
    for variant in technique.trials:
        if variant.device not in (None, device):
            continue
        told = ", ".join(f"{k}: {v}".lower() for k, v in variant.settings.items() if k != "allow_cpu")
        label = name + (f" ({told})" if told else "") + "".join(f" with {other}" for other in variant.with_techniques)
        adds = {**variant.with_techniques, name: variant.settings}
        kind = worst(*(kind_of(n, s, device) for n, s in adds.items()))
        gain = technique.gain if variant.gain is None else variant.gain
        yield Candidate(label, adds, kind=kind, fallback_of=before if variant.fallback else None, gain=gain)
        before = label


def kind_of(name: str, settings: Mapping[str, Any] | None, device: str | None = None) -> Exactness:
    """What a technique with these settings does to the numbers; without a device, the most that it does on any."""
    return technique_class(name).exactness_with(settings or {}, device)


def worst(*kinds: Exactness) -> Exactness:
    """The one that changes the numbers most."""
    return max(kinds, key=KINDS.index)


class Refused(Exception):
    """A candidate that is left out without a trial; the message is the reason."""


def apply_candidate(candidate: Candidate, current: Algorithms) -> dict[str, Any]:
    """``current`` with the candidate in it, and without what conflicts with it.

    A technique that the candidate names without settings keeps those that it has.

    Raises:
        Refused: Nothing would change, or what it conflicts with is part of the recipe.
    """
    changed = {n: s for n, s in current.items() if n not in candidate.removes} | {
        n: dict(s) for n, s in candidate.adds.items() if s or n not in current
    }
    added = build_techniques(stopping({n: changed[n] for n in candidate.adds}))
    for other in build_techniques(stopping(current)):
        if other.name in candidate.adds or other.name in candidate.removes:
            continue
        reason = next((reason for one in added if (reason := _conflict(one, other))), None)
        if reason is None:
            continue
        if kind_of(other.name, current[other.name]) == "recipe":
            raise Refused(f"{reason}; {other.name} is part of the recipe and stays")
        del changed[other.name]
    if key_of(changed) == key_of(current):
        raise Refused("already in the set")
    return changed


def _conflict(one: Technique, other: Technique) -> str | None:
    try:
        refuse_conflicts([one, other])
    except TechniqueError as error:
        return f"{error.technique}: {error.reason}"
    return None


def forbidden(kind: Exactness, allow: Collection[str]) -> str | None:
    """Why a candidate of this kind may not be tried; None when it may."""
    if kind in ("exact", "rounding") or kind in allow:
        return None
    what = "computes in less than float32" if kind == "lower_precision" else "changes the training recipe"
    allowed = ", ".join([*sorted(allow), kind])
    return f"{what}, which is not allowed; tune.allow=[{allowed}] lets it be tried"


def key_of(algorithms: Algorithms) -> tuple[str, ...]:
    """Equal for sets that train alike, whatever the order and whichever defaults are spelt out."""
    return tuple(sorted(map(repr, build_techniques(stopping(algorithms)))))


def stopping(algorithms: Algorithms) -> dict[str, Any]:
    """The same techniques without ``on_unavailable``: what cannot engage is to say so."""
    return {n: {k: v for k, v in settings.items() if k != "on_unavailable"} for n, settings in algorithms.items()}
