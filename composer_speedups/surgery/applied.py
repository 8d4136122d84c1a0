"""A technique's function that found nothing to do, or a model that carries the technique already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NoEffectWarning", "refuse_other_settings"]


class NoEffectWarning(UserWarning):
    """A technique's function left a model, or some of its modules, as they were."""


def refuse_other_settings(what: str, applied: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Stop where a model carries a technique with other settings than those asked for.

    Args:
        what: What is there already, as in "the model has <what> already".
        applied: Setting → value it was applied with; one that is missing was not given.
        wanted: Setting → value asked for now.

    Raises:
        ValueError: Names each setting that differs, both values, and the fix.
    """
    differing = [name for name in wanted if applied.get(name) != wanted[name]]
    if differing:
        had = ", ".join(f"{name}={applied.get(name)!r}" for name in differing)
        asked = ", ".join(f"{name}={wanted[name]!r}" for name in differing)
        raise ValueError(f"the model has {what} already, with {had} and not {asked}; build the model anew")
