"""The search over made-up trials and a made-up clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from composer_speedups.core.errors import ConfigError, RunFailedError
from composer_speedups.sweep.search import Result, Search
from composer_speedups.sweep.settings import TuneConfig
from composer_speedups.sweep.trials import Trial, break_even_steps
from composer_speedups.train.config.schema import Config

SDPA, FUSED, COMPILE, LORA = "sdpa_attention", "fused_optimizer", "torch_compile", "lora"
FACTORS = {SDPA: 0.8, FUSED: 0.9, COMPILE: 0.5, LORA: 0.1}
KINDS = {LORA: "recipe"}


@dataclass
class World:
    """Steps of 0.1 s times the techniques' factors; compiling takes 20 s; a trial takes ``wall`` seconds."""

    wall: float = 10.0
    jitter: Callable[[int], float] = lambda trial: 1.0
    change: Callable[[int, Trial], dict[str, Any]] = lambda number, trial: {}
    steps: int = 100
    refused: dict[str, str] = field(default_factory=dict)
    config: Config = field(default_factory=Config)
    time: float = 0.0
    sets: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def measure(self, label: str, algorithms: Any, steps: int, timeout: float) -> Trial:
        self.sets.append("+".join(algorithms))
        self.time += min(self.wall, timeout)
        if self.wall > timeout:
            return Trial(label, algorithms, "time", "not done", wall_seconds=timeout)
        step = 0.1 * self.jitter(len(self.sets))
        for name in algorithms:
            step *= FACTORS[name]
        start = 21.0 if COMPILE in algorithms else 1.0
        trial = Trial(label, algorithms, "ok", "", step, start, 3, 40 / step, 1.0, 400.0, self.wall)
        return dataclasses.replace(trial, **self.change(len(self.sets), trial))

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
        tune = TuneConfig(**{"budget_seconds": 1000.0, **settings})
        run: Any = self
        return Search(run, table, tune, now=lambda: self.time, tell=self.lines.append).run()


def label(result: Result) -> str | None:
    return None if result.chosen is None else result.chosen.label


def test_the_fastest_set_is_run_again_in_turns_with_the_original() -> None:
    world = World()
    result = world.search(FUSED, f"{FUSED}+{SDPA}", SDPA)
    assert label(result) == f"{FUSED}+{SDPA}"
    assert result.kept_original == ""
    assert result.speedup == pytest.approx(10.7 / (1 + 97 * 0.072))
    assert world.sets == ["", "", FUSED, f"{FUSED}+{SDPA}", SDPA, *["", f"{FUSED}+{SDPA}"] * 2]
    assert any("sdpa_attention: 500 samples/s, start 1.0 s" in line for line in world.lines)


def test_compiling_is_chosen_only_for_runs_that_are_long_enough() -> None:
    short = World(steps=100).search(COMPILE)
    assert (label(short), short.kept_original) == (None, "no set was faster")
    # 20 s more to start, 3 steps of that, and 0.05 s saved per step
    assert break_even_steps(short.original, short.trials[0]) == 403
    assert short.planned(short.trials[0]) == pytest.approx(21 + 97 * 0.05)
    assert label(World(steps=1000).search(COMPILE)) == COMPILE
    assert break_even_steps(short.trials[0], Trial("slower", step_seconds=0.2)) is None


@pytest.mark.parametrize(
    ("jitter", "chosen"),
    [
        # Trials: 1 and 2 the original (2 with more steps), 3 the set, and then the original and the set in turns.
        ({}, True),
        ({2: 1.3}, False),  # the original's times differ by more than the set saves
        ({4: 1.3}, False),
        ({5: 0.7}, False),  # the set's do
        ({3: 0.3, 5: 1.1, 7: 1.1}, False),  # the set's only trial was lucky
        ({5: 0.98}, True),
    ],
)
def test_a_set_must_be_faster_by_more_than_the_spread_of_either(jitter: dict[int, float], chosen: bool) -> None:
    result = World(jitter=lambda trial: jitter.get(trial, 1.0)).search(FUSED)
    assert len(result.pairs) == 2
    assert (label(result) == FUSED) == chosen
    assert chosen or "not faster by more than the noise" in result.kept_original


@pytest.mark.parametrize(
    ("number", "status", "kept", "chosen"),
    [
        (3, "out of memory", "no set could be tried", None),
        (5, "out of memory", "fused_optimizer failed when it was run again: why", None),
        (7, "out of memory", "fused_optimizer failed when it was run again: why", None),
        (4, "failed", "original failed when it was run again: why", None),
        (7, "time", "", FUSED),  # the pair before it counts
    ],
)
def test_a_trial_that_fails_is_reported(number: int, status: Any, kept: str, chosen: str | None) -> None:
    failing = {"status": status, "reason": "why"}
    result = World(change=lambda count, trial: failing if count == number else {}).search(FUSED)
    assert (label(result), result.kept_original) == (chosen, kept)


def test_an_original_run_that_fails_is_an_error() -> None:
    with pytest.raises(RunFailedError, match="the original run fails: why; train"):
        World(change=lambda *_: {"status": "out of memory", "reason": "why"}).search(FUSED)


def test_sets_that_are_refused_forbidden_or_equal_cost_no_trial() -> None:
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
    equal = World().search(f"{FUSED}+{SDPA}", f"{SDPA}+{FUSED}").trials
    assert [t.reason for t in equal] == ["", f"the same techniques as {FUSED}+{SDPA}"]
    with_lora = World(config=Config(algorithms={LORA: {}})).search(FUSED)
    assert with_lora.chosen is not None
    assert with_lora.chosen.algorithms == {LORA: {}, FUSED: {}}, "the recipe stays"


@pytest.mark.parametrize("repeats", [2, 20])
@pytest.mark.parametrize("budget", [50.0, 60.0, 100.0, 130.0, 1000.0])
def test_the_budget_is_kept_and_sets_without_time_are_named(budget: float, repeats: int) -> None:
    world = World()
    result = world.search(f"{FUSED}+{SDPA}", SDPA, COMPILE, FUSED, budget_seconds=budget, repeats=repeats)
    assert world.time == result.seconds <= budget
    assert label(result) == f"{FUSED}+{SDPA}"
    assert result.pairs
    untried = [trial for trial in result.trials if trial.status == "untried"]
    assert bool(untried) == (budget <= 60)
    assert all("increase tune.budget_seconds" in trial.reason for trial in untried)


@pytest.mark.parametrize(("wall", "steps"), [(1.0, None), (10.0, None), (77.0, 40)])
def test_the_smallest_useful_budget_is_named_and_suffices(wall: float, steps: int | None) -> None:
    for budget in (0.7 * wall, 3.5 * wall):
        small = World(wall=wall)
        with pytest.raises(ConfigError, match=r"^tune\.budget_seconds: .* set at least \d+") as error:
            small.search(FUSED, budget_seconds=max(1.0, budget), steps=steps)
        assert small.time <= wall, "it is refused after the first run"
        assert ("or a smaller tune.steps" in str(error.value)) == (steps is not None)
    least = float(str(error.value).split("at least ")[1].split(",")[0])
    world = World(wall=wall)
    assert label(world.search(FUSED, budget_seconds=least, steps=steps)) == FUSED
    assert world.time <= least


@pytest.mark.parametrize(("budget", "steps"), [(60.0, 8), (300.0, 200), (150.0, 108)])
def test_a_trial_has_as_many_steps_as_the_budget_allows(budget: float, steps: int) -> None:
    assert World().search(FUSED, SDPA, budget_seconds=budget).trial_steps == steps
