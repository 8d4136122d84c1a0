"""The search: each candidate alone, then stacked by gain, then thinned out, then confirmed against the given run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from composer_speedups.core.errors import ConfigError
from composer_speedups.tune.candidates import Candidate
from composer_speedups.tune.changes import Refused, apply_candidate, forbidden, key_of
from composer_speedups.tune.outcomes import Outcome, noise_of
from composer_speedups.tune.results import Bench, Result, Verdict, by_gain
from composer_speedups.tune.session import PROBE_STEPS, Session
from composer_speedups.tune.settings import TuneConfig

__all__ = ["BaselineError", "Search"]

_BASELINES = 1 / 3  # of the budget at most, for runs of the given set before the first trial
_KEPT = 0.4  # of the budget for stacking, confirming and batch sizes
_USEFUL = 4.5  # runs that a budget must hold: the given one, a trial, and a pair that confirms it, each a bit longer
_NO_TIME = "no time was left; a larger tune.budget_seconds tries it"


class BaselineError(Exception):
    """The given run itself fails, so that there is nothing to improve on."""


class Search:
    """Looks for the set of techniques with the shortest planned run.

    Args:
        given: Techniques of the given run.
        candidates: What to try, in this order.
        allow: Of ``lower_precision`` and ``recipe``, what candidates may change.
        settings: Budget, steps and repeats.
        bench: Trials, clock and console.
        batch_size: Of the given run; None leaves larger ones unmeasured.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        candidates: Sequence[Candidate],
        allow: Collection[str],
        settings: TuneConfig,
        bench: Bench,
        batch_size: int | None = None,
    ) -> None:
        self.result = Result(dict(given))
        self.result.verdicts = [Verdict(c) for c in candidates]
        self.allow, self.settings, self.batch_size = allow, settings, batch_size
        self.refusal, self.steps = bench.refusal, bench.steps
        self.session = Session(settings, bench, self.result)
        self._current: dict[str, Any] = {}
        self._current_seconds = math.inf

    def run(self) -> Result:
        """Search until done or out of time; the result always holds a set that is no slower than the given one.

        Raises:
            BaselineError: The given run fails.
            ConfigError: The budget does not even hold a run of the given set, a trial, and a pair that confirms it.
        """
        result = self.result
        self._baseline()
        self._alone()
        self._stack()
        self._thin_out()
        self._confirm()
        self._batch_sizes()
        result.seconds = self.session.spent
        return result

    # The five parts.

    def _baseline(self) -> None:
        result, settings = self.result, self.settings
        probe = self._given_once(settings.steps or PROBE_STEPS, "given (probe)")
        if probe.unengaged:
            result.unengaged = dict(probe.unengaged)
            result.given = {n: s for n, s in result.given.items() if n not in probe.unengaged}
        result.trial_steps = settings.steps or self.session.trial_steps(probe, _BASELINES * settings.budget_seconds)
        result.planned_steps = self.steps(probe)
        if result.trial_steps == PROBE_STEPS or settings.steps:
            result.baseline.append(probe)
        while len(result.baseline) < settings.repeats:
            if result.baseline and self.session.spent + self.session.wall > _BASELINES * settings.budget_seconds:
                break
            result.baseline.append(self._given_once(result.trial_steps, "given"))
        times = [self.session.plan(outcome) for outcome in result.baseline]
        result.base_seconds = statistics.median(times)
        result.noise = noise_of(times, settings.min_gain)
        self.session.remember(result.given, result.typical)
        self._current, self._current_seconds = result.given, result.base_seconds

    def _alone(self) -> None:
        verdicts = {v.candidate.label: v for v in self.result.verdicts}
        for verdict in self.result.verdicts:
            candidate = verdict.candidate
            before = verdicts.get(candidate.fallback_of or "")
            if before is not None and before.state != "refused":
                verdict.state, verdict.reason = "untried", f"{before.candidate.label} is to be had here"
                continue
            try:
                changed = apply_candidate(candidate, self.result.given)
                if refused := self.refusal(changed):
                    raise Refused(refused)
            except Refused as refused_because:
                verdict.state, verdict.reason = "refused", str(refused_because)
                continue
            if reason := forbidden(candidate.kind, self.allow):  # of what could be had
                verdict.state, verdict.reason = "untried", reason
                continue
            keep = max(_KEPT * self.settings.budget_seconds, self.session.reserve)
            outcome = self.session.measure(changed, candidate.label, keep)
            if outcome is None:
                verdict.state, verdict.reason = "untried", _NO_TIME
                continue
            self._note(verdict, outcome)
        states = [v.state for v in self.result.verdicts]
        if "measured" not in states and "failed" not in states and _NO_TIME in [v.reason for v in self.result.verdicts]:
            raise self._budget_error(self.session.wall)

    def _stack(self) -> None:
        result = self.result
        measured = by_gain(result.verdicts)
        gained = [v for v in measured if result.base_seconds - (v.alone_seconds or 0.0) > result.noise]
        if gained:
            first = gained.pop(0)
            self._current = apply_candidate(first.candidate, result.given)
            self._current_seconds = first.alone_seconds or 0.0
            first.stacked = (result.base_seconds, self._current_seconds)
        refused = [v for v in result.verdicts if v.state == "refused" and not forbidden(v.candidate.kind, self.allow)]
        little = [v for v in measured if v not in gained and v.stacked is None]
        # A technique that was refused alone may have what it needs by now; one that gave little may give more.
        for verdict in [*gained, *refused, *little]:
            self._try_on_top(verdict)

    def _try_on_top(self, verdict: Verdict) -> None:
        try:
            changed = apply_candidate(verdict.candidate, self._current)
        except Refused as refused:
            if verdict.state == "refused":
                verdict.reason = str(refused)
            return
        if refusal := self.refusal(changed):
            if verdict.state == "refused":
                verdict.reason = refusal
            return
        outcome = self.session.measure(changed, f"+ {verdict.candidate.label}", keep=self.session.reserve)
        if outcome is None:
            if verdict.state == "refused":
                verdict.state, verdict.reason = "untried", _NO_TIME
            return
        if verdict.alone is None:
            verdict.state = "measured" if outcome.ok else "failed"
        verdict.reason = outcome.reason
        seconds = self.session.plan(outcome)
        if outcome.ok:
            verdict.stacked = (self._current_seconds, seconds)
        if self._current_seconds - seconds > self.result.noise:
            self._current, self._current_seconds = changed, seconds

    def _thin_out(self) -> None:
        """What each added technique gives within the set; it goes where the set is faster without it."""
        for name in [n for n in self._current if self._current[n] != self.result.given.get(n)]:
            changed = {n: s for n, s in self._current.items() if n != name}
            if name in self.result.given:
                changed = {**self._current, name: self.result.given[name]}
            if refused := self.refusal(changed):
                self.result.without[name] = refused
                continue
            outcome = self.session.measure(changed, f"less {name}", keep=self.session.reserve)
            if outcome is None:
                return
            seconds = self.session.plan(outcome)
            self.result.without[name] = seconds if outcome.ok else outcome.reason
            if self._current_seconds - seconds > self.result.noise:
                self._current, self._current_seconds = changed, seconds

    def _confirm(self) -> None:
        """Given and chosen in turn: only what is faster here too is written."""
        result = self.result
        result.chosen = dict(result.given)
        if key_of(self._current) == key_of(result.given):
            tried = any(v.state in ("measured", "failed") for v in result.verdicts)
            result.kept_given = "nothing that was tried saved more than the noise" if tried else "nothing was tried"
            return
        for _ in range(self.settings.repeats):
            if self.session.left < (2.0 if result.pairs else 1.5) * self.session.wall:
                break
            times = []
            for algorithms, label in ((result.given, "given, again"), (self._current, "chosen, again")):
                outcome = self.session.once(algorithms, label, result.trial_steps, self.session.left)
                times.append(self.session.plan(outcome))
                if not outcome.ok and algorithms is self._current:
                    result.kept_given = f"the chosen set failed when it was run again: {outcome.reason}"
                    return
                if not outcome.ok:
                    break
            if len(times) == 2 and all(map(math.isfinite, times)):
                result.pairs.append((times[0], times[1]))
        if not result.pairs:
            result.kept_given = "no time was left to confirm the chosen set; give a larger tune.budget_seconds"
            return
        given, chosen = zip(*result.pairs, strict=True)
        noise = max(result.noise, noise_of(given, self.settings.min_gain), max(chosen) - min(chosen))
        if statistics.median(given) - statistics.median(chosen) <= noise:
            result.kept_given = "the chosen set was not faster, beyond the noise, when both were run again in turn"
            return
        result.chosen = dict(self._current)

    def _batch_sizes(self) -> None:
        if self.batch_size is None:
            return
        for factor in (1, 2, 4, 8):
            size, before = factor * self.batch_size, list(self.result.sizes.values())
            if before and not before[-1].ok:
                return
            if self.session.left < 2 * self.session.wall:
                return
            self.result.sizes[size] = self.session.once(
                self.result.chosen, f"batch size {size}", self.result.trial_steps, self.session.left, size
            )

    def _given_once(self, steps: int, label: str) -> Outcome:
        outcome = self.session.once(self.result.given, label, steps, self.session.left)
        if outcome.status == "time":
            raise self._budget_error(max(self.session.wall, outcome.wall_seconds))
        if not outcome.ok:
            raise BaselineError(f"the given run fails: {outcome.reason}")
        self.session.wall = outcome.wall_seconds
        return outcome

    def _budget_error(self, wall: float) -> ConfigError:
        """``wall``: seconds that a run of the given set takes, or has taken when it was ended."""
        fewer = "" if self.settings.steps is None else ", or a smaller tune.steps"
        return ConfigError(
            f"tune.budget_seconds: {self.settings.budget_seconds:g} s do not hold a run of the given YAML, a trial and "
            f"both once more to confirm it, of {wall:.0f} s or more each; give it at least "
            f"{math.ceil(_USEFUL * wall)}{fewer}"
        )

    def _note(self, verdict: Verdict, outcome: Outcome) -> None:
        verdict.state = "measured" if outcome.ok else "failed"
        verdict.alone, verdict.reason = outcome, outcome.reason
        verdict.alone_seconds = self.session.plan(outcome) if outcome.ok else None
