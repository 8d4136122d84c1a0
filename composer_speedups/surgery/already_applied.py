"""Calling a technique's function on a model that it cannot change, or that already has the technique."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NoEffectWarning", "refuse_other_settings"]


class NoEffectWarning(UserWarning):
    """A technique's function did not change the model, or skipped some of its modules."""


def refuse_other_settings(what: str, applied: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to apply a technique to a model that already has it with other settings.

    Args:
        what: The technique, as in "the model already has <what>".
        applied: Setting → value it was applied with; missing settings were not specified.
        wanted: Setting → value requested now.

    Raises:
        ValueError: Names each setting that differs, both values, and the fix.
    """
    differing = [name for name in wanted if applied.get(name) != wanted[name]]
    if differing:
        had = ", ".join(f"{name}={applied.get(name)!r}" for name in differing)
        asked = ", ".join(f"{name}={wanted[name]!r}" for name in differing)
        raise ValueError(f"the model already has {what} with {had}; to use {asked}, build a new model")
