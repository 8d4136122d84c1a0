"""The base class Technique: the constructor, the checks of settings, and the events that a technique receives."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

import pytest
from composer.core import Event, State
from pydantic import Field

from composer_speedups import recommended
from composer_speedups.core.errors import CannotRunError, ConfigError, TechniqueError
from composer_speedups.core.technique import Conflict, Stage, Technique, refuse_conflicts, techniques_of
from tests.helpers.common import make_trainer, plain_batches, trained


class Toy(Technique):
    name = "toy"
    stage = Stage.FLAGS
    exactness = "exact"

    count: int = Field(4, ge=1, le=8)
    """How many."""
    share: float = Field(0.5, gt=0, lt=1)
    """How much."""
    kind: Literal[8, "fp8"] | None = Field(None)
    """Which."""
    names: list[str] | None = Field(None)
    """Whose."""

    def check_settings(self) -> None:
        if self.kind == 8 and self.count == 8:
            raise ValueError("count=8 and kind=8 cannot go together")

    def reset(self) -> None:
        super().reset()
        self.calls: list[str] = []

    def engage(self, state: State) -> dict[str, Any]:
        return {}

    def verify(self, state: State) -> dict[str, Any]:
        self.calls.append("verify")
        return {}

    def batch_end(self, state: State) -> None:
        self.calls.append("batch_end")

    def fit_end(self, state: State) -> None:
        self.calls.append("fit_end")

    def eval_before_forward(self, state: State) -> None:
        self.calls.append("eval_before_forward")

    def watch(self, state: State) -> None:
        self.calls.append("watch")


def test_the_constructor_follows_the_declared_settings() -> None:
    parameters = inspect.signature(Toy).parameters
    assert {n: p.default for n, p in parameters.items()} == {
        "count": 4, "share": 0.5, "kind": None, "names": None, "on_unavailable": "stop"
    }  # fmt: skip
    assert parameters["on_unavailable"].kind is inspect.Parameter.KEYWORD_ONLY
    toy = Toy(2, names=["a"], on_unavailable="warn")
    assert (toy.count, toy.share, toy.names, toy.on_unavailable) == (2, 0.5, ["a"], "warn")
    assert repr(toy) == "Toy(count=2, share=0.5, kind=None, names=['a'])"
    assert Toy(names="ab").names == ["ab"]
    with pytest.raises(TypeError):
        Toy(2, 0.5, None, None, "warn")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count must be 1 to 8, not 0"),
        ({"count": 9}, "count must be 1 to 8, not 9"),
        ({"count": True}, "count must be a whole number, not True"),
        ({"count": 1.0}, "count must be a whole number, not 1.0"),
        ({"share": 0}, "share must be above 0 and below 1, not 0"),
        ({"share": math.nan}, "share must be a finite number, not nan"),
        ({"share": "0.5"}, "share must be a number, not '0.5'"),
        ({"kind": True}, "kind must be 8 or 'fp8' or null, not True"),
        ({"names": {}}, "names must be a list of text or null, not {}"),
        ({"names": [1]}, r"names must be a list of text or null, not \[1\]"),
        ({"on_unavailable": "ignore"}, "on_unavailable must be 'stop' or 'warn', not 'ignore'"),
        ({"count": 8, "kind": 8}, "count=8 and kind=8 cannot go together"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Toy(**settings)


def test_a_class_instead_of_an_instance_and_an_unknown_setting_are_one_clear_line() -> None:
    said = r"^algorithms: Toy is a class, not a technique; write Toy\(\)$"
    lists: list[Any] = [[Toy], [Toy(), Toy]]
    for algorithms in lists:
        with pytest.raises(ConfigError, match=said):
            trained(algorithms=algorithms)
    toys: Any = [Toy]
    for function in (refuse_conflicts, techniques_of):
        with pytest.raises(ConfigError, match=said):
            function(toys)
    mixed: Any = {
        "a list is in the list; write its items": [Toy(), [Toy()]],
        "'toy' is no technique; write an instance": [Toy(), "toy"],
        "<function recommended .*> is no technique": [Toy(), recommended],
    }
    for said, algorithms in mixed.items():
        with pytest.raises(ConfigError, match=f"^algorithms: {said}"):
            trained(algorithms=algorithms)
    with pytest.raises(TypeError, match=r"^Toy has no setting 'cuont'; did you mean 'count'\?$"):
        Toy(cuont=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("final", ["match", "apply", "run_event"])
def test_overriding_match_apply_or_run_event_is_refused(final: str) -> None:
    with pytest.raises(
        TypeError, match=rf"Listener\.{final} would never be called: match and apply are final.*batch_end"
    ):
        type("Listener", (Toy,), {final: lambda *_: True})


def test_a_technique_receives_only_the_events_it_has_methods_for() -> None:
    toy = Toy()
    trainer = make_trainer([toy], batches=plain_batches(3))
    always = {Event.INIT, Event.FIT_END}
    own = {Event.BATCH_END, Event.EVAL_BEFORE_FORWARD}
    first = {Event.BEFORE_FORWARD, Event.AFTER_FORWARD}
    assert {event for event in Event if toy.match(event, trainer.state)} == always | own | first
    trainer.fit()
    assert {event for event in Event if toy.match(event, trainer.state)} == always | own
    assert toy.calls == ["watch", "batch_end", "verify", "batch_end", "batch_end", "verify", "fit_end"]
    trainer.fit(duration="1ba")
    assert toy.calls[7:] == ["batch_end", "verify", "fit_end"], "at the end of each fit()"
    trainer.close()


def test_a_technique_that_was_withdrawn_receives_only_fit_end() -> None:
    toy = Toy(on_unavailable="warn")
    trainer = make_trainer([toy])
    with pytest.warns(UserWarning, match="continuing without toy: no kernel .to silence this: remove it"):
        toy.unavailable(CannotRunError("toy", "no kernel", "remove it"))
    assert toy.evidence == {"unavailable": "no kernel", "fix": "remove it", "applied": "withdrawn"}
    received = {Event.INIT, Event.FIT_END}
    assert {event for event in Event if toy.match(event, trainer.state)} == received
    trainer.fit()
    trainer.close()
    assert toy.calls == ["fit_end"]
    assert (toy.engaged, toy.applied, toy.in_force) == (False, True, False)


def test_a_technique_without_effect_still_receives_its_own_events() -> None:
    toy = Toy(on_unavailable="warn")
    trainer = make_trainer([toy])
    with pytest.warns(UserWarning, match="continuing although toy: was applied but did not take effect"):
        toy.unavailable(toy.not_engaged("nothing happened", "remove it"))
    assert toy.evidence["applied"] == "had no effect, kept"
    received = {Event.INIT, Event.FIT_END, Event.BATCH_END, Event.EVAL_BEFORE_FORWARD}
    assert {event for event in Event if toy.match(event, trainer.state)} == received
    trainer.fit(duration="1ba")
    trainer.close()
    assert toy.calls == ["batch_end", "fit_end"], "it is not verified"


def test_a_technique_that_never_engaged_receives_no_event_of_its_own() -> None:
    class Refused(Toy):
        def engage(self, state: State) -> dict[str, Any]:
            raise TechniqueError("toy", "the model has none", "remove it")

    toy = Refused(on_unavailable="warn")
    with pytest.warns(UserWarning, match="continuing without toy"):
        trainer = trained([toy])
    assert toy.evidence == {"unavailable": "the model has none", "fix": "remove it"}
    assert {event for event in Event if toy.match(event, trainer.state)} == {
        Event.INIT, Event.FIT_END
    }  # fmt: skip
    assert toy.calls == []


def test_a_postponed_verification_runs_one_batch_later() -> None:
    class Postponed(Toy):
        def batch_end(self, state: State) -> None:
            super().batch_end(state)
            if state.timestamp.batch.value == 1:
                self.postpone()

    toy = Postponed()
    trained([toy], batches=plain_batches(3))
    assert toy.calls == ["watch", "batch_end", "watch", "batch_end", "verify", "batch_end", "verify", "fit_end"]


def test_a_conflict_may_depend_on_the_settings_of_both() -> None:
    class Other(Toy):
        name = "other"
        conflicts = (Conflict("toy", "four is enough", when=lambda self, other: self.count + other.count > 8),)

    refuse_conflicts([Toy(4), Other(4)])
    for techniques in ([Toy(4), Other(5)], [Other(5), Toy(4)]):
        with pytest.raises(ValueError, match=r"^other: conflicts with toy: four is enough; remove other or toy$"):
            refuse_conflicts(techniques)
