"""A candidate put onto a set of techniques: what it displaces, and why it cannot be, said without a trial."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from composer_speedups.core.errors import TechniqueError, UserError
from composer_speedups.core.registry import build_techniques
from composer_speedups.core.requirements import Context
from composer_speedups.core.technique import Technique, refuse_clashes, screen
from composer_speedups.train.config import Config, Origins
from composer_speedups.train.config.checks import check_together
from composer_speedups.tune.candidates import Candidate, kind_of
from composer_speedups.tune.outcomes import Algorithms
from composer_speedups.tune.settings import Kind

__all__ = ["Refused", "apply_candidate", "available", "forbidden", "key_of", "refusal", "uses_autocast"]


class Refused(Exception):
    """A candidate that is left out without a trial; the message is the reason."""


def apply_candidate(candidate: Candidate, current: Algorithms) -> dict[str, Any]:
    """``current`` with the candidate in it, and without what clashes with it.

    A technique that the candidate names without settings keeps those that it has.

    Raises:
        Refused: Nothing would change, or what it clashes with is part of the recipe.
    """
    changed = {n: s for n, s in current.items() if n not in candidate.removes} | {
        n: dict(s) for n, s in candidate.adds.items() if s or n not in current
    }
    added = build_techniques(_stopping({n: changed[n] for n in candidate.adds}))
    for other in build_techniques(_stopping(current)):
        if other.name in candidate.adds or other.name in candidate.removes:
            continue
        reason = next((reason for one in added if (reason := _clash(one, other))), None)
        if reason is None:
            continue
        if kind_of(other.name, current[other.name]) == "recipe":
            raise Refused(f"{reason}; {other.name} is part of the recipe and stays")
        del changed[other.name]
    if key_of(changed) == key_of(current):
        raise Refused("already in the set")
    return changed


def _clash(one: Technique, other: Technique) -> str | None:
    try:
        refuse_clashes([one, other])
    except TechniqueError as error:
        return f"{error.technique}: {error.reason}"
    return None


def forbidden(kind: Kind, allow: Collection[str]) -> str | None:
    """Why a candidate of this kind may not be tried; None when it may."""
    if kind in ("exact", "rounding") or kind in allow:
        return None
    what = "computes in less than float32" if kind == "lower_precision" else "changes the training recipe"
    allowed = ", ".join([*sorted(allow), kind])
    return f"{what}, which is not allowed; tune.allow=[{allowed}] lets it be tried"


def refusal(algorithms: Algorithms, config: Config, context: Context) -> str | None:
    """Why a run with these techniques would be refused before its model is built; None when it would not."""
    whole = copy.copy(config)
    whole.algorithms = _stopping(algorithms)
    try:
        check_together(whole, Origins("config"))
        screen(build_techniques(whole.algorithms), context)
    except TechniqueError as error:
        return f"{error.technique}: {error.reason}"
    except UserError as error:
        return str(error).removeprefix("config: ")
    return None


def available(config: Config, context: Context) -> tuple[dict[str, Any], dict[str, str]]:
    """The given techniques, less those with ``on_unavailable: warn`` that cannot engage here, and why these cannot.

    Raises:
        TechniqueError: One that must engage cannot.
    """
    techniques = build_techniques(config.algorithms, config.on_unavailable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the YAML will say it
        screen(techniques, context)
    left = {t.name: str(t.evidence["unavailable"]) for t in techniques if t.engaged is False}
    return {n: s for n, s in config.algorithms.items() if n not in left}, left


def uses_autocast(config: Config) -> bool:
    """Whether the given run trains in 16 bits already, so that lower precision is no news to it."""
    return config.trainer.precision != "fp32" or bool({"mixed_precision", "kahan_optimizer"} & set(config.algorithms))


def key_of(algorithms: Algorithms) -> tuple[str, ...]:
    """Equal for sets that train alike, whatever the order and whichever defaults are spelt out."""
    return tuple(sorted(map(repr, build_techniques(_stopping(algorithms)))))


def _stopping(algorithms: Algorithms) -> dict[str, Any]:
    """Without ``on_unavailable``: what cannot engage is to say so."""
    return {
        name: {k: v for k, v in settings.items() if k != "on_unavailable"} if isinstance(settings, Mapping) else {}
        for name, settings in algorithms.items()
    }
