"""Composer's rules for algorithms, asked of every technique as if it were one of Composer's own.

They restate what Composer's generic algorithm tests ask (tests/algorithms of its repository: trains twice, repr,
idempotence, autoload), with the classes registered on ``composer.algorithms`` for the time of a test.
"""

from __future__ import annotations

import copy
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
from tests.helpers.common import SAVING, final_weights, make_trainer, tiny_bert, trained
from tests.helpers.settings import Case, cases

every_technique = pytest.mark.parametrize("case", cases())
every_class = pytest.mark.parametrize("name", technique_names())


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every technique on composer.algorithms, and in its ``__all__``."""
    classes = [technique_class(name) for name in technique_names()]
    for cls in classes:
        monkeypatch.setattr(composer.algorithms, cls.__name__, cls, raising=False)
    monkeypatch.setattr(composer.algorithms, "Widening", Widening, raising=False)
    monkeypatch.setattr(composer.algorithms, "__all__", [*composer.algorithms.__all__, *(c.__name__ for c in classes)])


class Widening(Technique):
    """A technique that adds a parameter, which no model without it can load."""

    name = "widening"
    stage = Stage.SURGERY
    changes_structure = True

    exactness = "recipe"

    size: int = Field(3)

    def engage(self, state: State) -> dict[str, Any]:
        model: Any = state.model.model
        if not hasattr(model, "wide"):
            model.wide = nn.Parameter(torch.zeros(self.size))
        return {}

    def verify(self, state: State) -> dict[str, Any]:
        return {}


@every_class
@pytest.mark.pins
def test_class_names_are_no_names_of_composers(name: str) -> None:
    """Composer evaluates a recorded class name in its own namespace at resume."""
    composers = {
        n for n, c in vars(composer.algorithms).items() if inspect.isclass(c) and "composer.algo" in c.__module__
    }
    assert len(composers) > 20
    assert technique_class(name).__name__ not in composers


@every_technique
@pytest.mark.pins
def test_its_repr_evaluates_where_composer_evaluates_it(case: Case) -> None:
    technique = case.build()
    assert "at 0x" not in repr(technique)
    again = eval(f"composer.algorithms.{technique!r}", {"composer": composer})
    assert type(again) is type(technique)
    assert repr(again) == repr(technique)


@every_class
def test_it_is_an_algorithm_of_composers_with_its_signatures(name: str) -> None:
    cls = technique_class(name)
    assert issubclass(cls, Algorithm)
    assert cls.required_on_load() is cls.changes_structure
    assert cls.__init__ is not Algorithm.__init__
    optional = list(inspect.signature(cls).parameters.values())
    assert all(p.default is not p.empty for p in optional), "Composer's tests build it without arguments"


@every_technique
def test_a_second_trainer_on_its_model_and_object_changes_nothing_more(case: Case) -> None:
    """Composer's test of idempotence hands the same object to both Trainers."""
    techniques = case.build_all()
    once = make_trainer(techniques)
    model = copy.deepcopy(once.state.model)
    types = [type(m) for m in model.modules()]
    once.close()  # which gives some techniques' changes back
    twice = make_trainer(techniques, model=model)
    assert techniques[-1].engaged is True
    assert list(twice.state.model.state_dict()) == list(model.state_dict())
    assert [type(m) for m in twice.state.model.modules()] == types
    torch.testing.assert_close(twice.state.model.state_dict(), once.state.model.state_dict(), rtol=0, atol=0)
    twice.close()


@every_technique
def test_one_object_trains_again_and_engages_anew_in_a_second_trainer(case: Case) -> None:
    """The second run is the same as the first, verified by its own first batch."""
    techniques = case.build_all()
    results = []
    for _ in range(2):
        trainer = make_trainer(techniques, model=tiny_bert())
        assert techniques[-1].engaged is True
        assert not set(case.entry.evidence) <= set(techniques[-1].evidence), "evidence of the run before"
        trainer.fit()
        assert set(case.entry.evidence) <= set(techniques[-1].evidence)
        results.append(final_weights(trainer))
        if len(results) == 1:
            trainer.fit(duration="2ba")
            again = final_weights(trainer)
        trainer.close()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert all(w.isfinite().all() for w in again.values())
    assert any(not torch.equal(again[name], w) for name, w in results[0].items())


def _checkpoint(techniques: list[Algorithm], folder: Path) -> str:
    trained(techniques, callbacks=[EngagementReport()], save_folder=str(folder), **SAVING)
    return str(folder / "ba2.pt")


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_changes_the_structure_is_added_when_its_checkpoint_is_loaded(tmp_path: Path, weights_only: bool) -> None:
    path = _checkpoint([Widening(5)], tmp_path)
    with pytest.warns(UserWarning, match=r"Automatically adding required_on_load algorithm Widening\(size=5\)"):
        trainer = make_trainer([], callbacks=[EngagementReport()], load_path=path, load_weights_only=weights_only)
    (added,) = trainer.state.algorithms
    assert isinstance(added, Widening)
    assert added.engaged is True
    assert trainer.state.model.model.wide.shape == (5,)
    trainer.close()


def test_an_added_one_is_there_once_and_may_be_left_out(tmp_path: Path) -> None:
    path = _checkpoint([Widening(5)], tmp_path)
    trainer = make_trainer([Widening(5)], load_path=path)
    assert len(trainer.state.algorithms) == 1
    trainer.close()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"model\.wide"'):
        make_trainer([], load_path=path, load_weights_only=True, load_exclude_algorithms=["Widening"])


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict")
def test_one_that_is_added_engages_beside_those_of_the_list(tmp_path: Path) -> None:
    """After it was added, the lists agree; without what the checkpoint's list had, they do not."""
    path = _checkpoint([Widening(), FusedOptimizer()], tmp_path)
    with pytest.warns(UserWarning, match="Automatically adding"):
        trainer = make_trainer([FusedOptimizer()], callbacks=[EngagementReport()], load_path=path)
    assert [type(a).__name__ for a in trainer.state.algorithms] == ["FusedOptimizer", "Widening"]
    assert all(a.engaged for a in trainer.state.algorithms)
    trainer.close()
    with pytest.warns(UserWarning, match="Automatically adding"), pytest.raises(ConfigError, match="SDPAAttention"):
        make_trainer([SDPAAttention()], load_path=path)


def test_where_it_is_not_registered_composer_skips_it_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composer looks among its own algorithms only; our EngagementReport is what stops such a run."""
    path = _checkpoint([Widening()], tmp_path)
    monkeypatch.delattr(composer.algorithms, "Widening")
    with pytest.raises(ConfigError, match=r"techniques \[Widening\(size=3\)\] and this run has \[\]"):
        make_trainer([], callbacks=[EngagementReport()], load_path=path)
