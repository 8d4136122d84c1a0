"""Composer's rules for algorithms, checked for every technique as if it were one of Composer's own.

The tests correspond to Composer's generic algorithm tests (tests/algorithms in its repository). A fixture registers the
technique classes on ``composer.algorithms``.
"""

from __future__ import annotations

import inspect

import composer.algorithms
import pytest
from composer.core import Algorithm

from composer_speedups.core.registry import technique_class, technique_names
from tests.helpers.settings import ENTRIES, Case, cases

every_technique = pytest.mark.parametrize("case", cases())
every_class = pytest.mark.parametrize("name", technique_names())


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add every technique to composer.algorithms and its ``__all__``."""
    classes = [technique_class(name) for name in technique_names()]
    for cls in classes:
        monkeypatch.setattr(composer.algorithms, cls.__name__, cls, raising=False)
    monkeypatch.setattr(composer.algorithms, "__all__", [*composer.algorithms.__all__, *(c.__name__ for c in classes)])


@every_class
@pytest.mark.pins
def test_class_names_differ_from_composers(name: str) -> None:
    """On resume, Composer evaluates the recorded class names in its own namespace."""
    composers = {
        n for n, c in vars(composer.algorithms).items() if inspect.isclass(c) and "composer.algo" in c.__module__
    }
    assert len(composers) > 20
    assert technique_class(name).__name__ not in composers


@every_technique
@pytest.mark.pins
def test_the_repr_evaluates_in_composers_namespace(case: Case) -> None:
    technique = case.build()
    assert "at 0x" not in repr(technique)
    again = eval(f"composer.algorithms.{technique!r}", {"composer": composer})
    assert type(again) is type(technique)
    assert repr(again) == repr(technique)


@every_class
def test_a_class_is_a_composer_algorithm_with_optional_arguments(name: str) -> None:
    cls = technique_class(name)
    assert issubclass(cls, Algorithm)
    assert cls.required_on_load() is not ENTRIES[name].stock_checkpoint
    assert cls.__init__ is not Algorithm.__init__
    assert cls() is not None, "Composer's tests construct algorithms without arguments"
