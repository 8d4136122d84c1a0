"""The search over made-up trials and a made-up clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from composer_speedups.core.errors import CannotRunError, ConfigError
from composer_speedups.tune.candidates import Algorithms, Candidate
from composer_speedups.tune.results import Outcome, Result, break_even_steps, noise_of
from composer_speedups.tune.search import Search
from composer_speedups.tune.settings import TuneConfig

SDPA = Candidate("sdpa_attention", {"sdpa_attention": {}}, kind="rounding")
FUSED = Candidate("fused_optimizer", {"fused_optimizer": {}}, kind="rounding")
FOREACH = Candidate("foreach_optimizer", {"foreach_optimizer": {}}, kind="rounding")
COMPILE = Candidate("torch_compile", {"torch_compile": {}}, kind="rounding")
LORA = Candidate("lora", {"lora": {}}, kind="recipe")
GAINS = {"sdpa_attention": 0.8, "fused_optimizer": 0.9, "foreach_optimizer": 0.95, "torch_compile": 0.5, "lora": 0.1}


@dataclass
class World:
    """Steps of 0.1 s times the techniques' factors; compiling takes ``compile_seconds``; a trial takes ``wall``."""

    wall: float = 10.0
    compile_seconds: float = 20.0
    jitter: Callable[[int], float] = lambda trial: 1.0
    refuse: dict[str, str] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    fail: dict[str, Outcome] = field(default_factory=dict)
    steps: int = 100
    time: float = 0.0
    sets: list[dict[str, Any]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    techniques: dict[str, Any] = field(default_factory=dict)

    def measure(self, algorithms: Algorithms, *, steps: int, timeout: float, batch_size: int | None = None) -> Outcome:
        self.sets.append(dict(algorithms))
        self.timeouts.append(timeout)
        if self.wall > timeout:
            self.time += timeout
            return Outcome("time", "not done", wall_seconds=timeout)
        self.time += self.wall
        if failed := next((self.fail[n] for n in algorithms if n in self.fail), None):
            return failed
        step = 0.1 * self.jitter(len(self.sets))
        for name in algorithms:
            step *= GAINS[name]
        start = 1.0 + (self.compile_seconds if "torch_compile" in algorithms else 0.0)
        return Outcome("ok", "", step, start, 3, 40 / step, 1.0, 400.0, self.wall)

    def refusal(self, algorithms: Algorithms) -> str | None:
        lacks = (f"add {need}" for name, need in self.needs.items() if name in algorithms and need not in algorithms)
        return next((self.refuse[n] for n in algorithms if n in self.refuse), next(lacks, None))

    def planned_steps(self, outcome: Outcome) -> int:
        return self.steps

    def search(
        self,
        *candidates: Candidate,
        original: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Result:
        self.techniques = original or {}
        tune = TuneConfig(**{"budget_seconds": 1000.0, **settings})
        return Search(self, candidates, tune, now=lambda: self.time, tell=self.lines.append).run()


def test_faster_candidates_are_stacked_and_confirmed() -> None:
    world = World()
    result = world.search(FUSED, SDPA)
    assert result.chosen == {"sdpa_attention": {}, "fused_optimizer": {}}
    assert result.kept_original is None
    assert len(result.pairs) == 2
    assert result.speedup == pytest.approx(10.7 / (1 + 97 * 0.072), rel=1e-6)
    assert world.sets[-4:] == [{}, result.chosen, {}, result.chosen], "original and chosen take turns"
    assert result.without["fused_optimizer"] == pytest.approx(1 + 97 * 0.08)


def test_of_two_conflicting_candidates_the_faster_is_chosen() -> None:
    assert World().search(FOREACH, FUSED).chosen == {"fused_optimizer": {}}


def test_compiling_is_chosen_for_long_runs_only() -> None:
    short = World(steps=100).search(COMPILE)
    assert short.chosen == {}
    assert short.kept_original is not None
    verdict = short.verdicts[0]
    assert verdict.alone is not None
    assert verdict.alone_seconds == pytest.approx(21 + 97 * 0.05)
    # 20 s more to start, 3 batches of that: 0.05 s saved a step
    assert break_even_steps(short.baseline[0], verdict.alone) == 403
    assert World(steps=404).search(COMPILE, min_gain=0.0).chosen == {"torch_compile": {}}
    assert World(steps=402).search(COMPILE, min_gain=0.0).chosen == {}


def test_an_original_technique_that_does_not_pay_is_removed() -> None:
    without = Candidate("without torch_compile", removes=("torch_compile",))
    assert World(steps=100).search(without, original={"torch_compile": {}}).chosen == {}
    assert World(steps=1000).search(without, original={"torch_compile": {}}).chosen == {"torch_compile": {}}


def test_gains_within_the_noise_are_not_chosen() -> None:
    # The original run's steps differ by a half from one run to the next; a tenth off tells nothing.
    result = World(jitter=lambda trial: 1.5 if trial == 2 else 1.0).search(FUSED, steps=10)
    assert result.noise == pytest.approx(97 * 0.05)
    assert result.chosen == {}
    assert "noise" in (result.kept_original or "")
    assert World().search(FUSED, min_gain=0.2).chosen == {}


def test_gains_within_the_noise_are_not_confirmed() -> None:
    # The original run's trials differ by 9 %; the candidate, 4, saves 7 % of their mean.
    result = World(jitter=lambda trial: {2: 1.09, 4: 1.02}.get(trial, 1.0)).search(FOREACH)
    assert result.kept_original == "no trial was faster than the original by more than the noise"
    assert result.pairs == []


@pytest.mark.parametrize(
    ("jitter", "chosen"),
    [
        # Trials: 1 to 3 the original run, of which the probe is not compared, 4 the candidate alone, then original and
        # chosen in turn.
        ({}, True),
        ({2: 1.09, 4: 0.5}, False),  # the first runs of the original set differ by 9 %, and the candidate saves 5 %
        ({5: 1.12}, False),  # the original set's differ by more when they are run again
        ({6: 0.9, 8: 1.02}, False),  # the chosen set's do
        ({6: 0.98, 8: 1.0}, True),
    ],
)
def test_a_gain_must_exceed_the_spread_of_the_first_and_of_the_confirming_runs(
    jitter: dict[int, float], chosen: bool
) -> None:
    result = World(jitter=lambda trial: jitter.get(trial, 1.0)).search(FOREACH, min_gain=0.01)
    assert result.pairs
    assert result.chosen == ({"foreach_optimizer": {}} if chosen else {}), [t.label for t in result.trials]


def test_a_lucky_trial_is_not_confirmed() -> None:
    # Trial 4 is the candidate's (probe, two of the original run before it); all later ones are slow.
    world = World(jitter=lambda trial: 1.0 if trial < 4 else (0.3 if trial == 4 else 1.2))
    result = world.search(FUSED)
    assert result.pairs
    assert result.chosen == {"fused_optimizer": {}}, "a tenth is left of it"
    unlucky = World(jitter=lambda trial: {4: 0.3, 6: 1.3, 8: 1.3}.get(trial, 1.0)).search(FUSED)
    assert unlucky.pairs
    assert unlucky.chosen == {}
    assert "run again in turn" in (unlucky.kept_original or "")
    assert unlucky.speedup is None


def test_a_chosen_set_that_fails_in_a_confirming_run_is_not_written() -> None:
    world = World()
    inner = world.measure

    def measure(algorithms: Algorithms, **kwargs: Any) -> Outcome:
        outcome = inner(algorithms, **kwargs)
        return outcome if not algorithms or len(world.sets) < 6 else Outcome("memory", "ran out of memory")

    world.measure = measure  # type: ignore[method-assign]
    result = world.search(FUSED)
    assert result.chosen == {}
    assert "ran out of memory" in (result.kept_original or "")


def test_a_confirming_run_that_times_out_leaves_the_pairs_before_it() -> None:
    class Slower(World):
        def measure(self, algorithms: Algorithms, **kwargs: Any) -> Outcome:
            if self.sets.count(dict(algorithms)) == 2 and algorithms:
                self.wall = 5000.0  # the second confirming run of the chosen set
            return super().measure(algorithms, **kwargs)

    world = Slower()
    result = world.search(SDPA, repeats=3)
    assert len(result.pairs) == 1
    assert result.kept_original is None
    assert result.chosen == {"sdpa_attention": {}}


def test_the_recipe_changes_only_if_allowed() -> None:
    world = World()
    result = world.search(LORA)
    assert not any("lora" in techniques for techniques in world.sets)
    assert result.verdicts[0].state == "untried"
    assert "tune.allow=[recipe]" in result.verdicts[0].reason
    assert World().search(LORA, allow=["recipe"]).chosen == {"lora": {}}


def test_a_refused_candidate_costs_no_trial_and_is_tried_once_its_requirements_are_met() -> None:
    world = World(refuse={"sdpa_attention": "it needs a GPU"})
    result = world.search(SDPA)
    assert not any("sdpa_attention" in techniques for techniques in world.sets)
    assert (result.verdicts[0].state, result.verdicts[0].reason) == ("refused", "it needs a GPU")
    assert result.kept_original == "nothing was tried"

    result = World(needs={"sdpa_attention": "fused_optimizer"}).search(SDPA, FUSED)
    assert result.chosen == {"fused_optimizer": {}, "sdpa_attention": {}}
    assert result.without["fused_optimizer"] == "add fused_optimizer"


def test_a_forbidden_candidate_is_not_tried_once_its_requirements_are_met() -> None:
    needy = World(needs={"lora": "fused_optimizer"})
    result = needy.search(LORA, FUSED)
    assert result.verdicts[0].reason == "add fused_optimizer", "not that allowing it would do"
    assert not any("lora" in techniques for techniques in needy.sets)


def test_a_fallback_is_tried_only_if_the_first_candidate_is_refused() -> None:
    second = Candidate("foreach_optimizer", FOREACH.adds, kind="rounding", fallback_of="fused_optimizer")
    assert World().search(FUSED, second).verdicts[1].state == "untried"
    assert World(refuse={"fused_optimizer": "no"}).search(FUSED, second).chosen == {"foreach_optimizer": {}}


def test_a_trial_that_fails_is_an_outcome() -> None:
    world = World(fail={"sdpa_attention": Outcome("memory", "ran out of memory")})
    result = world.search(SDPA, FUSED)
    assert (result.verdicts[0].state, result.verdicts[0].reason) == ("failed", "ran out of memory")
    assert result.chosen == {"fused_optimizer": {}}


@pytest.mark.parametrize("budget", [45.0, 60.0, 80.0, 100.0, 130.0, 200.0])
def test_the_budget_is_kept_and_untried_candidates_are_named(budget: float) -> None:
    world = World()
    result = world.search(FUSED, SDPA, COMPILE, FOREACH, budget_seconds=budget)
    assert world.time <= budget
    assert result.seconds == world.time
    assert result.chosen == {} or result.pairs, "nothing is chosen that was not confirmed"
    untried = [v for v in result.verdicts if v.state == "untried"]
    assert bool(untried) == (budget < 110)
    assert any(v.state == "measured" for v in result.verdicts)
    assert all("tune.budget_seconds" in v.reason for v in untried)
    if budget == 60:
        assert untried[0].reason == (
            "a trial may take 12 s, and 6 s were left for it: of the budget of 60 s, 30 s were spent and 24 s are kept "
            "for combining and confirming; increase tune.budget_seconds to try it"
        )


@pytest.mark.parametrize("repeats", [2, 20])
@pytest.mark.parametrize("budget", [45.0, 60.0, 100.0, 300.0, 1000.0])
def test_the_first_runs_of_the_original_set_take_at_most_a_third_of_the_budget(budget: float, repeats: int) -> None:
    world = World()
    result = world.search(FUSED, SDPA, budget_seconds=budget, repeats=repeats)
    first = next(i for i, techniques in enumerate(world.sets) if techniques)
    assert first * world.wall <= budget / 3
    assert 1 <= len(result.baseline) <= repeats


@pytest.mark.parametrize("wall", [1.0, 10.0, 77.0])
def test_the_smallest_useful_budget_is_named_and_suffices(wall: float) -> None:
    small = World(wall=wall)
    with pytest.raises(ConfigError, match=r"^tune\.budget_seconds: .* set at least \d+$") as error:
        small.search(FUSED, SDPA, budget_seconds=4 * wall)
    assert small.time < 2 * wall, "it is refused after the first run"
    least = float(str(error.value).rpartition(" ")[2])
    assert least < 5.5 * wall
    world = World(wall=wall)
    result = world.search(FUSED, SDPA, budget_seconds=least)
    assert result.chosen == {"fused_optimizer": {}}
    assert result.pairs
    assert world.time <= least


def test_a_budget_too_small_for_one_run_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"tune\.budget_seconds: 7 s is too short .* set at least 32$"):
        World().search(FUSED, budget_seconds=7.0)
    with pytest.raises(ConfigError, match=r"or a smaller tune\.steps$"):
        World().search(FUSED, budget_seconds=7.0, steps=40)


def test_a_search_without_candidates_needs_no_budget() -> None:
    assert World().search(LORA, budget_seconds=20.0).kept_original == "nothing was tried"


def test_an_original_run_that_fails_is_an_error() -> None:
    world = World(fail={"sdpa_attention": Outcome("memory", "ran out of memory")})
    with pytest.raises(CannotRunError, match="the original run fails: ran out of memory; train"):
        world.search(FUSED, original={"sdpa_attention": {}})


def test_no_set_is_measured_twice_before_the_confirming_runs() -> None:
    world = World()
    result = world.search(FUSED, SDPA, FOREACH, COMPILE)
    confirmed = 2 * len(result.pairs)
    measured = [tuple(sorted(s)) for s in world.sets[3:-confirmed]]  # after the probe and the original runs
    assert len(set(measured)) == len(measured)


def test_progress_names_the_measured_set_and_the_time_left() -> None:
    world = World()
    world.search(FUSED)
    assert any("fused_optimizer: 444 samples/s, start 1.0 s, planned run 9.7 s" in line for line in world.lines)
    assert all("s to go" in line for line in world.lines)


def test_the_probe_is_the_baseline_if_a_longer_run_exceeds_a_third_of_the_budget() -> None:
    """With 9 s around its steps a trial would train for 3 s: a run of 12 s more would come after the probe's 10."""
    assert World().search(FUSED, budget_seconds=80.0).trial_steps > 8
    small = World().search(FUSED, budget_seconds=60.0)
    assert small.trial_steps == 8
    assert len(small.baseline) == 2, "the probe is one of them"


def test_arithmetic_of_the_planned_run() -> None:
    outcome = Outcome("ok", step_seconds=0.5, start_seconds=4.0, other_batches=3)
    assert [outcome.planned_seconds(steps) for steps in (103, 2)] == [54.0, 4.0]
    assert Outcome("failed").planned_seconds(2) == float("inf")
    assert noise_of([10.0, 10.5], 0.02) == 0.5
    assert noise_of([10.0, 10.0], 0.02) == pytest.approx(0.2)
    slower = Outcome("ok", step_seconds=0.6, start_seconds=4.0, other_batches=3)
    assert break_even_steps(outcome, slower) is None
    assert break_even_steps(slower, outcome) == 3, "their starts are alike, and each holds three steps"
