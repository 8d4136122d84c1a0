"""The search: try candidates separately, stack them by gain, remove useless ones, confirm against the original run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from composer_speedups.core.errors import CannotRunError, ConfigError
from composer_speedups.tune.candidates import Algorithms, Candidate, Refused, apply_candidate, forbidden, key_of
from composer_speedups.tune.results import Outcome, Result, Trial, Verdict, noise_of
from composer_speedups.tune.settings import TuneConfig

if TYPE_CHECKING:
    from composer_speedups.tune.trials import OriginalRun

__all__ = ["Search"]

_PROBE_STEPS, MAX_STEPS = 8, 200  # steps of a trial
_WANTED_TRIALS = 20  # trials that the budget should have room for
_MAX_BASELINE = 1 / 3  # maximum fraction of the budget for runs of the original set before the first trial
_TRIALS_RESERVE = 0.4  # fraction of the budget that separate trials leave for stacking, confirming and batch sizes
_MAX_PAIRS = 0.25  # maximum fraction of the budget reserved for the confirming pairs, but at least one pair
_MIN_RUNS = 4.5  # minimum budget in runs: the original one, a trial, a pair to confirm it, and some margin
_print = partial(print, flush=True)


class Search:
    """Searches for the set of techniques with the shortest planned run, within a time budget.

    Args:
        run: The original run: its techniques, its length, and why it refuses a set; it measures trials, and kills them
            within two seconds of their timeout.
        candidates: What to try, in this order.
        settings: Budget, steps, repeats, and the permitted kinds of change beyond rounding; none if ``allow`` is None.
        batch_size: The original run's batch size; None skips larger ones.
        now: Returns the time in seconds.
        tell: Receives each line of progress.
    """

    def __init__(
        self,
        run: OriginalRun,
        candidates: Sequence[Candidate],
        settings: TuneConfig,
        batch_size: int | None = None,
        now: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = _print,
    ) -> None:
        self.result = Result(dict(run.techniques), verdicts=[Verdict(c) for c in candidates])
        self._run, self._settings, self._batch_size = run, settings, batch_size
        self._clock, self._tell, self._started = now, tell, now()
        self._wall = 0.0  # duration of the latest trial of the original run, to predict the next
        self._seen: dict[tuple[str, ...], Outcome] = {}
        self._current: dict[str, Any] = {}
        self._current_seconds = math.inf

    def run(self) -> Result:
        """Search until done or out of time. The result is the original set unless another one was faster in the
        confirming runs.

        Raises:
            CannotRunError: The original run fails, so there is nothing to compare with.
            ConfigError: The budget is too small for a run of the original set, a trial, and a pair to confirm it.
        """
        self._baseline()
        self._try_separately()
        self._stack()
        self._remove_useless()
        self._confirm()
        self._batch_sizes()
        self.result.seconds = self._spent
        return self.result

    # The steps of the search.

    def _baseline(self) -> None:
        result, settings = self.result, self._settings
        probe = self._original_once(settings.steps or _PROBE_STEPS, "original (probe)")
        if probe.unengaged:
            result.unengaged = dict(probe.unengaged)
            result.original = {n: s for n, s in result.original.items() if n not in probe.unengaged}
        most = _MAX_BASELINE * settings.budget_seconds
        result.trial_steps = settings.steps or self._trial_steps(probe, most)
        result.planned_steps = self._run.planned_steps(probe)
        if result.trial_steps == _PROBE_STEPS or settings.steps:
            result.baseline.append(probe)
        while len(result.baseline) < settings.repeats:
            if result.baseline and self._spent + self._wall > most:
                break
            result.baseline.append(self._original_once(result.trial_steps, "original"))
        times = [self._plan(outcome) for outcome in result.baseline]
        result.base_seconds = statistics.median(times)
        result.noise = noise_of(times, settings.min_gain)
        self._seen[key_of(result.original)] = result.typical
        self._current, self._current_seconds = result.original, result.base_seconds

    def _try_separately(self) -> None:
        verdicts = {v.candidate.label: v for v in self.result.verdicts}
        no_time = ""  # one reason for all, which are listed together
        for verdict in self.result.verdicts:
            candidate = verdict.candidate
            first = verdicts.get(candidate.fallback_of or "")
            if first is not None and first.state != "refused":
                verdict.state, verdict.reason = "untried", f"it is tried only if {first.candidate.label} is refused"
                continue
            try:
                changed = self._with(candidate, self.result.original)
            except Refused as refused:
                verdict.state, verdict.reason = "refused", str(refused)
                continue
            if reason := forbidden(candidate.kind, self._settings.allow or ()):
                verdict.state, verdict.reason = "untried", reason
                continue
            keep = max(_TRIALS_RESERVE * self._settings.budget_seconds, self._reserve)
            outcome = self._measure(changed, candidate.label, keep)
            if outcome is None:
                no_time = no_time or self._no_time(keep)
                verdict.state, verdict.reason = "untried", no_time
                continue
            verdict.state = "measured" if outcome.ok else "failed"
            verdict.alone, verdict.reason = outcome, outcome.reason
            verdict.alone_seconds = self._plan(outcome) if outcome.ok else None
        states = {v.state for v in self.result.verdicts}
        if no_time and not states & {"measured", "failed"}:
            raise self._budget_error(self._wall)

    def _stack(self) -> None:
        result = self.result
        measured = [(v.alone_seconds, v) for v in result.verdicts if v.alone_seconds is not None]
        measured.sort(key=lambda pair: pair[0])
        gained = [v for seconds, v in measured if result.base_seconds - seconds > result.noise]
        little = [v for _, v in measured if v not in gained]
        if gained:
            first = gained.pop(0)
            assert first.alone_seconds is not None
            self._current = apply_candidate(first.candidate, result.original)
            self._current_seconds = first.alone_seconds
            first.stacked = (result.base_seconds, first.alone_seconds)
        allow = self._settings.allow or ()
        refused = [v for v in result.verdicts if v.state == "refused" and not forbidden(v.candidate.kind, allow)]
        # A technique that was refused separately may now have its requirements, and one with a small gain may gain
        # more.
        for verdict in [*gained, *refused, *little]:
            self._try_on_top(verdict)

    def _try_on_top(self, verdict: Verdict) -> None:
        refused = verdict.state == "refused"
        try:
            changed = self._with(verdict.candidate, self._current)
        except Refused as still:
            verdict.reason = str(still) if refused else verdict.reason
            return
        outcome = self._measure(changed, f"+ {verdict.candidate.label}", self._reserve)
        if outcome is None:
            if refused:
                verdict.state, verdict.reason = "untried", self._no_time(self._reserve)
            return
        if verdict.alone is None:
            verdict.state = "measured" if outcome.ok else "failed"
        verdict.reason = outcome.reason
        if outcome.ok:
            verdict.stacked = (self._current_seconds, self._plan(outcome))
        self._take_if_faster(changed, outcome)

    def _remove_useless(self) -> None:
        """Measure the set without each added technique, and remove those without which it is faster."""
        original = self.result.original
        for name in [n for n in self._current if self._current[n] != original.get(n)]:
            changed = {n: s for n, s in self._current.items() if n != name}
            if name in original:
                changed = {**self._current, name: original[name]}
            if refused := self._run.refusal(changed):
                self.result.without[name] = refused
                continue
            outcome = self._measure(changed, f"without {name}", self._reserve)
            if outcome is None:
                return
            self.result.without[name] = self._plan(outcome) if outcome.ok else outcome.reason
            self._take_if_faster(changed, outcome)

    def _confirm(self) -> None:
        """Run the original and the chosen set in turns; the chosen set is written only if it is faster here too."""
        result = self.result
        result.chosen = dict(result.original)
        if key_of(self._current) == key_of(result.original):
            tried = any(v.state in ("measured", "failed") for v in result.verdicts)
            result.kept_original = (
                "no trial was faster than the original by more than the noise" if tried else "nothing was tried"
            )
            return
        for _ in range(self._settings.repeats):
            if self._left < (2.0 if result.pairs else 1.5) * self._wall:
                break
            original = self._once(result.original, "original (confirming)", result.trial_steps)
            if not original.ok:
                continue
            chosen = self._once(self._current, "chosen (confirming)", result.trial_steps)
            if chosen.status == "time":
                break  # the pairs so far count
            if not chosen.ok:
                result.kept_original = f"the chosen set failed when it was run again: {chosen.reason}"
                return
            result.pairs.append((self._plan(original), self._plan(chosen)))
        if not result.pairs:
            result.kept_original = "no time was left to confirm the chosen set; set a larger tune.budget_seconds"
            return
        before, after = zip(*result.pairs, strict=True)
        noise = max(result.noise, noise_of(before, self._settings.min_gain), max(after) - min(after))
        if statistics.median(before) - statistics.median(after) <= noise:
            result.kept_original = (
                "the chosen set was not faster by more than the noise when both were run again in turns"
            )
            return
        result.chosen = dict(self._current)

    def _batch_sizes(self) -> None:
        if self._batch_size is None:
            return
        result = self.result
        for size in (factor * self._batch_size for factor in (1, 2, 4, 8)):
            if self._left < 2 * self._wall or not all(outcome.ok for outcome in result.sizes.values()):
                return
            label = f"batch size {size}"
            result.sizes[size] = self._once(result.chosen, label, result.trial_steps, batch_size=size)

    # Trials. ``_measure`` runs each set once, and only if there is time for it.

    def _with(self, candidate: Candidate, current: Algorithms) -> dict[str, Any]:
        """``current`` with the candidate's techniques.

        Raises:
            Refused: It would change nothing, or train.py would refuse it.
        """
        changed = apply_candidate(candidate, current)
        if reason := self._run.refusal(changed):
            raise Refused(reason)
        return changed

    def _take_if_faster(self, changed: dict[str, Any], outcome: Outcome) -> None:
        seconds = self._plan(outcome)
        if self._current_seconds - seconds > self.result.noise:
            self._current, self._current_seconds = changed, seconds

    def _original_once(self, steps: int, label: str) -> Outcome:
        outcome = self._once(self.result.original, label, steps)
        if outcome.status == "time":
            raise self._budget_error(max(self._wall, outcome.wall_seconds))
        if not outcome.ok:
            reason = f"the original run fails: {outcome.reason}"
            raise CannotRunError("original YAML", reason, "train.py must run it first")
        self._wall = outcome.wall_seconds
        return outcome

    def _measure(self, algorithms: Algorithms, label: str, keep: float) -> Outcome | None:
        """The outcome of a set, from an earlier trial if there is one; None if less than ``keep`` seconds would
        remain."""
        key, left = key_of(algorithms), self._left - keep
        if key not in self._seen:
            if left < self._longest_trial:
                return None
            self._seen[key] = self._once(algorithms, label, self.result.trial_steps, left)
        return self._seen[key]

    def _once(
        self,
        algorithms: Algorithms,
        label: str,
        steps: int,
        timeout: float | None = None,
        batch_size: int | None = None,
    ) -> Outcome:
        """Run one trial, within ``timeout`` seconds or the remaining time, and at least one second."""
        timeout = max(1.0, self._left if timeout is None else timeout)
        outcome = self._run.measure(algorithms, steps=steps, timeout=timeout, batch_size=batch_size)
        planned = self._plan(outcome) if self.result.planned_steps and batch_size is None else math.nan
        self.result.trials.append(Trial(label, algorithms, steps, batch_size, outcome, planned))
        summary = outcome.reason
        if outcome.ok:
            summary = f"{outcome.samples_per_sec:,.0f} samples/s, start {outcome.start_seconds:.1f} s"
            summary += f", planned run {planned:,.1f} s" if math.isfinite(planned) else ""
        ahead = 1 + sum(v.state == "open" for v in self.result.verdicts) + 2 * self._settings.repeats
        left = min(max(0.0, self._left), ahead * max(self._wall, outcome.wall_seconds))
        self._tell(f"{self._spent:5.0f} s, at most {left:.0f} s to go  {label}: {summary}")
        return outcome

    def _plan(self, outcome: Outcome) -> float:
        return outcome.planned_seconds(self.result.planned_steps)

    def _trial_steps(self, probe: Outcome, baselines: float) -> int:
        """Steps per trial, so that about twenty trials fit into the budget and, up to 200 steps, at least a quarter of
        each trial is training.

        If another run of the original set would end later than ``baselines`` seconds from the start, the probe's steps
        are returned, and the probe serves as the baseline.
        """
        overhead = max(0.0, probe.wall_seconds - _PROBE_STEPS * probe.step_seconds)
        training = max(self._settings.budget_seconds / _WANTED_TRIALS - overhead, overhead / 3)
        steps = max(_PROBE_STEPS, min(MAX_STEPS, int(training / probe.step_seconds)))
        longer = probe.wall_seconds + (steps - _PROBE_STEPS) * probe.step_seconds
        return steps if self._spent + longer <= baselines else _PROBE_STEPS

    @property
    def _longest_trial(self) -> float:
        return 1.2 * self._wall

    def _no_time(self, keep: float) -> str:
        """Why :meth:`_measure` returned None."""
        budget = self._settings.budget_seconds
        return (
            f"a trial may take {self._longest_trial:.0f} s, and {max(0.0, self._left - keep):.0f} s were left for it: "
            f"of the budget of {budget:g} s, {self._spent:.0f} s were spent and {keep:.0f} s are kept for combining "
            "and confirming; increase tune.budget_seconds to try it"
        )

    @property
    def _spent(self) -> float:
        return self._clock() - self._started

    @property
    def _left(self) -> float:
        return self._settings.budget_seconds - self._spent

    @property
    def _reserve(self) -> float:
        """Seconds reserved for the pairs at the end."""
        pair = 2.2 * self._wall
        return min(self._settings.repeats * pair, max(pair, _MAX_PAIRS * self._settings.budget_seconds))

    def _budget_error(self, wall: float) -> ConfigError:
        """``wall``: seconds that a run of the original set takes, or took until it was killed."""
        budget, fewer = (
            self._settings.budget_seconds,
            "" if self._settings.steps is None else ", or a smaller tune.steps",
        )
        return ConfigError(
            f"tune.budget_seconds: {budget:g} s is too short for four runs of {wall:.0f} s or more each (the original "
            f"YAML, a trial, and one more of both to confirm it); set at least "
            f"{math.ceil(_MIN_RUNS * wall)}{fewer}"
        )
