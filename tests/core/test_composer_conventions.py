"""Composer's rules for algorithms, checked for every technique as if it were one of Composer's own.

The tests correspond to Composer's generic algorithm tests (tests/algorithms in its repository: trains twice, repr,
idempotence, autoload). A fixture registers the technique classes on ``composer.algorithms``.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import composer.algorithms
import pytest
import torch
from composer.core import Algorithm, State
from pydantic import Field
from torch import nn

from composer_speedups import EngagementReport, FusedOptimizer, SDPAAttention
from composer_speedups.core.catalogue import technique_names
from composer_speedups.core.errors import ConfigError
from composer_speedups.core.registry import technique_class
from composer_speedups.core.technique import Stage, Technique
from tests.helpers.common import SAVING, make_trainer, trained
from tests.helpers.settings import ENTRIES, Case, cases

every_technique = pytest.mark.parametrize("case", cases())
every_class = pytest.mark.parametrize("name", technique_names())


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add every technique to composer.algorithms and its ``__all__``."""
    classes = [technique_class(name) for name in technique_names()]
    for cls in classes:
        monkeypatch.setattr(composer.algorithms, cls.__name__, cls, raising=False)
    monkeypatch.setattr(composer.algorithms, "Widening", Widening, raising=False)
    monkeypatch.setattr(composer.algorithms, "__all__", [*composer.algorithms.__all__, *(c.__name__ for c in classes)])


class Widening(Technique):
    """A technique that adds a parameter, so that models without it cannot load its checkpoints."""

    name = "widening"
    stage = Stage.SURGERY
    exactness = "recipe"

    size: int = Field(3)

    @staticmethod
    def required_on_load() -> bool:
        return True

    def engage(self, state: State) -> dict[str, Any]:
        model: Any = state.model.model
        if not hasattr(model, "wide"):
            model.wide = nn.Parameter(torch.zeros(self.size))
        return {}

    def verify(self, state: State) -> dict[str, Any]:
        return {}


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
    optional = list(inspect.signature(cls).parameters.values())
    assert all(p.default is not p.empty for p in optional), "Composer's tests construct algorithms without arguments"


def _checkpoint(techniques: list[Algorithm], folder: Path) -> str:
    trained(techniques, callbacks=[EngagementReport()], save_folder=str(folder), **SAVING)
    return str(folder / "ba2.pt")


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_technique_that_changes_the_structure_is_added_on_load(tmp_path: Path, weights_only: bool) -> None:
    path = _checkpoint([Widening(5)], tmp_path)
    with pytest.warns(UserWarning, match=r"Automatically adding required_on_load algorithm Widening\(size=5\)"):
        trainer = make_trainer([], callbacks=[EngagementReport()], load_path=path, load_weights_only=weights_only)
    (added,) = trainer.state.algorithms
    assert isinstance(added, Widening)
    assert added.engaged is True
    assert trainer.state.model.model.wide.shape == (5,)
    trainer.close()


def test_an_added_technique_is_not_duplicated_and_can_be_excluded(tmp_path: Path) -> None:
    path = _checkpoint([Widening(5)], tmp_path)
    trainer = make_trainer([Widening(5)], load_path=path)
    assert len(trainer.state.algorithms) == 1
    trainer.close()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"model\.wide"'):
        make_trainer([], load_path=path, load_weights_only=True, load_exclude_algorithms=["Widening"])


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict")
def test_an_added_technique_engages_together_with_the_listed_ones(tmp_path: Path) -> None:
    """The lists agree after the addition; they still differ if another technique of the checkpoint is missing."""
    path = _checkpoint([Widening(), FusedOptimizer()], tmp_path)
    with pytest.warns(UserWarning, match="Automatically adding"):
        trainer = make_trainer([FusedOptimizer()], callbacks=[EngagementReport()], load_path=path)
    assert [type(a).__name__ for a in trainer.state.algorithms] == ["FusedOptimizer", "Widening"]
    assert all(a.engaged for a in trainer.state.algorithms)
    trainer.close()
    with pytest.warns(UserWarning, match="Automatically adding"), pytest.raises(ConfigError, match="SDPAAttention"):
        make_trainer([SDPAAttention()], load_path=path)


def test_composer_silently_skips_an_unregistered_technique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composer searches only its own algorithms; the EngagementReport stops such a run."""
    path = _checkpoint([Widening()], tmp_path)
    monkeypatch.delattr(composer.algorithms, "Widening")
    with pytest.raises(ConfigError, match=r"techniques \[Widening\(size=3\)\] and this run has \[\]"):
        make_trainer([], callbacks=[EngagementReport()], load_path=path)
