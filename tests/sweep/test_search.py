"""The search over made-up trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from composer_speedups.core.errors import RunFailedError
from composer_speedups.sweep import trials
from composer_speedups.sweep.trials import Result, Trial, search
from composer_speedups.sweep.tune import TuneConfig
from composer_speedups.train.config.schema import Config

SDPA, FUSED, COMPILE, LORA = "sdpa_attention", "fused_optimizer", "torch_compile", "lora"
FACTORS = {SDPA: 0.8, FUSED: 0.9, COMPILE: 0.5, LORA: 0.1}
KINDS = {LORA: "recipe"}


@dataclass
class World:
    """Steps of 0.1 s times the techniques' factors; compiling takes 20 s; a trial takes 10 seconds of the budget."""

    jitter: Callable[[int], float] = lambda trial: 1.0
    change: Callable[[int], dict[str, Any]] = lambda number: {}
    steps: int = 100
    refused: dict[str, str] = field(default_factory=dict)
    config: Config = field(default_factory=Config)
    sets: list[str] = field(default_factory=list)

    def measure(self, label: str, algorithms: Any, steps: int, timeout: float | None = None) -> Trial:
        self.sets.append("+".join(algorithms))
        step = 0.1 * self.jitter(len(self.sets))
        for name in algorithms:
            step *= FACTORS[name]
        start = 21.0 if COMPILE in algorithms else 1.0
        trial = Trial(label, algorithms, "ok", "", step, start, 3, 40 / step, 1.0, 400.0)
        return dataclasses.replace(trial, **self.change(len(self.sets)))

    def refusal(self, algorithms: Any) -> str | None:
        return next((self.refused[name] for name in algorithms if name in self.refused), None)

    def planned_steps(self, trial: Trial) -> int:
        return self.steps

    def search(self, *sets: str, **settings: Any) -> Result:
        """Try sets of techniques, whose names are joined by ``+``."""
        table: dict[Any, Any] = {}
        for label in sets:
            kind = next((KINDS[name] for name in label.split("+") if name in KINDS), "rounding")
            table.setdefault(kind, {})[label] = {name: {} for name in label.split("+")}
        run: Any = self
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trials.time, "monotonic", lambda: 10.0 * len(self.sets))
            return search(run, table, TuneConfig(**settings))


def label(result: Result) -> str | None:
    return None if result.chosen is None else result.chosen.label


def test_the_fastest_set_is_run_again_in_turns_with_the_original() -> None:
    world = World()
    result = world.search(FUSED, f"{FUSED}+{SDPA}", SDPA)
    assert label(result) == f"{FUSED}+{SDPA}"
    assert result.kept_original == ""
    assert result.speedup == pytest.approx(10.7 / (1 + 97 * 0.072))
    assert world.sets == ["", FUSED, f"{FUSED}+{SDPA}", SDPA, *["", f"{FUSED}+{SDPA}"] * 2]


def test_compiling_is_chosen_only_for_runs_that_are_long_enough() -> None:
    short = World(steps=100).search(COMPILE)
    assert (label(short), short.kept_original) == (None, "no set was faster")
    assert label(World(steps=1000).search(COMPILE)) == COMPILE


@pytest.mark.parametrize(
    ("jitter", "chosen"),
    [
        # Trials: 1 the original, 2 the set, and then the original and the set in turns.
        ({}, True),
        ({1: 1.3}, False),  # the original's times differ by more than the set saves
        ({3: 1.3}, False),
        ({4: 0.7}, False),  # the set's do
        ({2: 0.3, 4: 1.1, 6: 1.1}, False),  # the set's only trial was lucky
        ({4: 0.98}, True),
    ],
)
def test_a_set_must_be_faster_by_more_than_the_spread_of_either(jitter: dict[int, float], chosen: bool) -> None:
    result = World(jitter=lambda trial: jitter.get(trial, 1.0)).search(FUSED)
    assert len(result.again["fastest"]) == 2
    assert (label(result) == FUSED) == chosen
    assert chosen or "not faster by more than the noise" in result.kept_original


@pytest.mark.parametrize(
    ("number", "kept"),
    [
        (2, "no set could be tried"),
        (3, "original failed when it was run again: why"),
        (6, "fused_optimizer failed when it was run again: why"),
    ],
)
def test_a_trial_that_fails_is_reported(number: int, kept: str) -> None:
    failing = {"status": "out of memory", "reason": "why"}
    result = World(change=lambda count: failing if count == number else {}).search(FUSED)
    assert (label(result), result.kept_original) == (None, kept)


def test_an_original_run_that_fails_is_an_error() -> None:
    with pytest.raises(RunFailedError, match="the original run fails: why; train"):
        World(change=lambda _: {"status": "out of memory", "reason": "why"}).search(FUSED)


def test_sets_that_are_refused_forbidden_equal_or_late_cost_no_trial() -> None:
    world = World(refused={SDPA: "it needs a GPU"}, config=Config(algorithms={FUSED: {}}))
    result = world.search(SDPA, LORA, FUSED)
    assert set(world.sets) == {FUSED}, "the original's"
    assert [(t.status, t.reason) for t in result.trials] == [
        ("refused", "it needs a GPU"),
        ("untried", "the same techniques as the original YAML"),
        ("untried", "changes the training recipe, which is not allowed; tune.allow=[recipe] allows it"),
    ]
    assert result.kept_original == "no set could be tried"
    assert label(World().search(LORA, allow=["recipe"])) == LORA
    with_lora = World(config=Config(algorithms={LORA: {}})).search(FUSED)
    assert with_lora.chosen is not None
    assert with_lora.chosen.algorithms == {LORA: {}, FUSED: {}}, "the recipe stays"
    late = World().search(FUSED, SDPA, budget_seconds=15)
    assert [trial.status for trial in late.trials] == ["ok", "untried"]
    assert "increase tune.budget_seconds" in late.trials[1].reason
