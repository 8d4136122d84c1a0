"""Try sets of techniques within a time budget, and run the fastest and the original set again in turns."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from composer_speedups.core.errors import ConfigError, RunFailedError
from composer_speedups.sweep.sets import Algorithms, Changes, combined, forbidden, key_of
from composer_speedups.sweep.settings import TuneConfig
from composer_speedups.sweep.trials import OriginalRun, Trial

_FIRST_STEPS, _MAX_STEPS = 8, 200  # steps of the first trial, and at most of each
_MIN_GAIN = 0.02  # fraction of the planned run's time below which a difference always counts as noise
_MARGIN = 1.2  # how much longer than the original run's a trial may take
_LEAST_RUNS = 4.5  # budget in runs: the original set, another one, both again, and a margin
_print = functools.partial(print, flush=True)


@dataclass
class Result:
    """What a search measured. Times are in seconds."""

    original: Trial
    planned_steps: int
    trial_steps: int
    trials: list[Trial] = field(default_factory=list)  # one for each set of the table
    pairs: list[tuple[Trial, Trial]] = field(default_factory=list)  # the original and the fastest set, run again
    noise: float = 0.0  # least difference of planned times that counts
    chosen: Trial | None = None  # a set that was faster than the original by more than the noise
    kept_original: str = ""  # why there is none
    seconds: float = 0.0

    def planned(self, trial: Trial) -> float:
        return trial.planned_seconds(self.planned_steps)

    def again(self) -> tuple[list[float], list[float]]:
        """Planned times of the original and the fastest set in each pair."""
        return [self.planned(one) for one, _ in self.pairs], [self.planned(other) for _, other in self.pairs]

    @property
    def speedup(self) -> float | None:
        """Median planned time of the original set divided by that of the chosen one, both run in turns."""
        before, after = self.again()
        return None if self.chosen is None else statistics.median(before) / statistics.median(after)


class Search:
    """Measures each set once, and the fastest one again.

    Args:
        run: The original run, which measures trials.
        sets: What to try, in this order: what the sets change at most → label → set.
        settings: Budget, steps, repeats, and what a set may change; nothing beyond rounding if ``allow`` is None.
        now: Returns the time in seconds.
        tell: Receives a line after each trial.
    """

    result: Result  # known after the original set was measured

    def __init__(
        self,
        run: OriginalRun,
        sets: Mapping[Changes, Mapping[str, Algorithms]],
        settings: TuneConfig,
        now: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = _print,
    ) -> None:
        self._run, self._sets, self._settings, self._now, self._tell = run, sets, settings, now, tell
        self._end = now() + settings.budget_seconds

    @property
    def _left(self) -> float:
        """Seconds until the end of the budget."""
        return self._end - self._now()

    def run(self) -> Result:
        """Search until done or out of time.

        Raises:
            RunFailedError: The original run fails, so there is nothing to compare with.
            ConfigError: The budget is too small for a run of the original set, a trial, and both again.
        """
        self._measure_original()
        seen = {key_of(self._run.config.algorithms): "the original YAML"}
        for changes, labelled in self._sets.items():
            for label, techniques in labelled.items():
                algorithms = combined(self._run.config, techniques)
                if reason := forbidden(changes, self._settings.allow or ()):
                    trial = Trial(label, algorithms, "untried", reason)
                else:
                    trial = self._try(label, algorithms, seen)
                self.result.trials.append(trial)
        self._run_fastest_again()
        self.result.seconds = self._settings.budget_seconds - self._left
        return self.result

    def _measure_original(self) -> None:
        """Measure a few steps, and then as many as let all sets be tried within the budget and, up to 200, train for a
        quarter of each trial."""
        steps = self._settings.steps or _FIRST_STEPS
        first = self._measure_original_for(steps)
        planned = self._run.planned_steps(first)
        if self._settings.steps is None:
            overhead = max(0.0, first.wall_seconds - steps * first.step_seconds)
            share = self._left / (sum(map(len, self._sets.values())) + 2 * self._settings.repeats + 1)
            wanted = min(_MAX_STEPS, int(max(share - overhead, overhead / 3) / first.step_seconds))
            if wanted > steps and self._left > _LEAST_RUNS * (overhead + wanted * first.step_seconds):
                steps, first = wanted, self._measure_original_for(wanted)
        self.result = Result(first, planned, steps)

    def _measure_original_for(self, steps: int) -> Trial:
        trial = self._measure("original", self._run.config.algorithms, steps, self._left)
        wall = trial.wall_seconds
        if trial.status == "time" or (trial.ok and self._left < 3 * _MARGIN * wall):
            least = math.ceil(self._settings.budget_seconds - self._left + 3.5 * _MARGIN * wall)
            fewer = "" if self._settings.steps is None else ", or a smaller tune.steps"
            raise ConfigError(
                f"tune.budget_seconds: {self._settings.budget_seconds:g} s is too short for four runs of {wall:.0f} s "
                f"or more (the original YAML, a set, and both again); set at least {least}{fewer}"
            )
        if not trial.ok:
            raise RunFailedError(f"original YAML: the original run fails: {trial.reason}; train.py must run it first")
        return trial

    def _try(self, label: str, algorithms: Algorithms, seen: dict[tuple[str, ...], str]) -> Trial:
        if reason := self._run.refusal(algorithms):
            return Trial(label, algorithms, "refused", reason)
        if same := seen.get(key := key_of(algorithms)):
            return Trial(label, algorithms, "untried", f"the same techniques as {same}")
        repeats, wall = self._settings.repeats, _MARGIN * self.result.original.wall_seconds
        # for running the fastest and the original set again
        kept = max(2 * wall, min(2 * repeats * wall, self._settings.budget_seconds / 4))
        if (left := self._left - kept) < wall:
            reason = f"no time was left for a trial of {wall:.0f} s; increase tune.budget_seconds"
            return Trial(label, algorithms, "untried", reason)
        seen[key] = label
        return self._measure(label, algorithms, self.result.trial_steps, left)

    def _run_fastest_again(self) -> None:
        """Run the original and the fastest set in turns. It is chosen only if it is faster here too."""
        result, original = self.result, self.result.original
        base = result.planned(original)
        result.noise = _MIN_GAIN * base
        fastest = min(result.trials, key=result.planned, default=original)
        if base - result.planned(fastest) <= result.noise:
            result.kept_original = "no set was faster" if fastest.ok else "no set could be tried"
            return
        reason = f"no time was left to run {fastest.label} again; increase tune.budget_seconds"
        for _ in range(self._settings.repeats):
            if self._left < 2 * original.wall_seconds:
                break
            one, other = (
                self._measure(trial.label, trial.algorithms, result.trial_steps, self._left)
                for trial in (original, fastest)
            )
            if one.ok and other.ok:
                result.pairs.append((one, other))
                continue
            failed = other if one.ok else one
            reason = f"{failed.label} failed when it was run again: {failed.reason}"
            if failed.status != "time":
                result.pairs.clear()
            break
        if result.pairs:
            before, after = result.again()
            result.noise = max(result.noise, _spread([base, *before]), _spread(after))
            reason = f"{fastest.label} was not faster by more than the noise when both were run again in turns"
            if statistics.median(before) - statistics.median(after) > result.noise:
                result.chosen, reason = fastest, ""
        result.kept_original = reason

    def _measure(self, label: str, algorithms: Algorithms, steps: int, timeout: float) -> Trial:
        trial = self._run.measure(label, algorithms, steps, max(1.0, timeout))
        measured = f"{trial.samples_per_sec:,.0f} samples/s, start {trial.start_seconds:.1f} s"
        spent = f"{self._settings.budget_seconds - self._left:5.0f} s of {self._settings.budget_seconds:g}"
        self._tell(f"{spent}  {label}: {trial.reason or measured}")
        return trial


def _spread(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return ordered[-1] - ordered[0]
