"""Trials within a budget: each set once, a line of progress for each, and none that the clock has no room for."""

from __future__ import annotations

import math

from composer_speedups.tune.changes import key_of
from composer_speedups.tune.outcomes import Algorithms, Outcome, planned_seconds
from composer_speedups.tune.results import Bench, Result, Trial
from composer_speedups.tune.settings import TuneConfig

__all__ = ["PROBE_STEPS", "Session"]

PROBE_STEPS = 8
_MOST_STEPS = 200
_TRIALS = 20  # that a budget should have room for
_PAIRS = 0.25  # of the budget is enough for the pairs at the end, if it holds one


class Session:
    """What a search measures with.

    Args:
        settings: Budget, steps and repeats.
        bench: Trials, clock and console.
        result: Gets every trial; ``planned_steps`` and ``trial_steps`` are read there.

    Attributes:
        wall: Seconds of the latest trial of the given run, for guessing the next.
    """

    def __init__(self, settings: TuneConfig, bench: Bench, result: Result) -> None:
        self.settings, self.bench, self.result = settings, bench, result
        self.wall = 0.0
        self._started = bench.now()
        self._seen: dict[tuple[str, ...], Outcome] = {}

    @property
    def spent(self) -> float:
        return self.bench.now() - self._started

    @property
    def left(self) -> float:
        return self.settings.budget_seconds - self.spent

    @property
    def reserve(self) -> float:
        """Seconds kept for the pairs at the end."""
        pair = 2.2 * self.wall
        return min(self.settings.repeats * pair, max(pair, _PAIRS * self.settings.budget_seconds))

    def remember(self, algorithms: Algorithms, outcome: Outcome) -> None:
        """Let :meth:`measure` answer with this outcome."""
        self._seen[key_of(algorithms)] = outcome

    def measure(self, algorithms: Algorithms, label: str, keep: float) -> Outcome | None:
        """The outcome of a set, from an earlier trial where there is one; None where it would not leave ``keep``."""
        key = key_of(algorithms)
        if key not in self._seen:
            left = self.left - keep
            if left < 1.2 * self.wall:
                return None
            self._seen[key] = self.once(algorithms, label, self.result.trial_steps, left)
        return self._seen[key]

    def once(
        self, algorithms: Algorithms, label: str, steps: int, timeout: float, batch_size: int | None = None
    ) -> Outcome:
        """One trial, whatever came before; ``timeout`` is at least a second."""
        outcome = self.bench.measure(algorithms, steps=steps, timeout=max(1.0, timeout), batch_size=batch_size)
        planned = self.plan(outcome) if self.result.planned_steps and batch_size is None else math.nan
        self.result.trials.append(Trial(label, algorithms, steps, batch_size, outcome, planned))
        self.bench.tell(self._line(label, outcome, planned))
        return outcome

    def plan(self, outcome: Outcome) -> float:
        """Seconds of the planned run."""
        return planned_seconds(outcome, self.result.planned_steps)

    def trial_steps(self, probe: Outcome, baselines: float) -> int:
        """Steps for which about twenty trials fit; a trial trains for a quarter of its time at least.

        The probe's own where another run of the given set would end later than ``baselines`` seconds from the start:
        then the probe is the one to compare with.
        """
        around = max(0.0, probe.wall_seconds - PROBE_STEPS * probe.step_seconds)
        training = max(self.settings.budget_seconds / _TRIALS - around, around / 3)
        steps = max(PROBE_STEPS, min(_MOST_STEPS, int(training / probe.step_seconds)))
        longer = probe.wall_seconds + (steps - PROBE_STEPS) * probe.step_seconds
        return steps if self.spent + longer <= baselines else PROBE_STEPS

    def _line(self, label: str, outcome: Outcome, planned: float) -> str:
        ahead = 1 + sum(v.state == "open" for v in self.result.verdicts) + 2 * self.settings.repeats
        left = min(max(0.0, self.left), ahead * max(self.wall, outcome.wall_seconds))
        said = outcome.reason
        if outcome.ok:
            said = f"{outcome.samples_per_sec:,.0f} samples/s, start {outcome.start_seconds:.1f} s"
            said += f", planned run {planned:,.1f} s" if math.isfinite(planned) else ""
        return f"{self.spent:5.0f} s, at most {left:.0f} s to go  {label}: {said}"
