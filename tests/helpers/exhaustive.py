"""Parameters of which the default run takes a few. The others have the marker ``exhaustive``: CI runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

DEFAULT_FAMILIES = ("bert", "modernbert", "deberta_v2")  # one with each kind of attention


def others_exhaustive(values: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """Return pytest parameters, with the marker ``exhaustive`` on those that ``keep`` is false for.

    A tuple is one value for each argument; marks and ids of parameters are kept.
    """
    parameters = []
    for value in values:
        is_parameter = isinstance(value, type(pytest.param()))
        given: Any = value if is_parameter else pytest.param(*(value if isinstance(value, tuple) else (value,)))
        marks = [] if keep(given.values[0] if is_parameter else value) else [pytest.mark.exhaustive]
        parameters.append(pytest.param(*given.values, id=given.id, marks=[*given.marks, *marks]))
    return parameters


def family_params(families: Iterable[str]) -> list[Any]:
    """Return pytest parameters of model families; those beyond :data:`DEFAULT_FAMILIES` are exhaustive."""
    return others_exhaustive(families, DEFAULT_FAMILIES.__contains__)
