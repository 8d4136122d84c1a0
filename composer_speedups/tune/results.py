"""What a search found: every trial, a verdict on every candidate, and the set that won."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from composer_speedups.tune.candidates import Candidate
from composer_speedups.tune.outcomes import Algorithms, Outcome, planned_seconds

__all__ = ["Bench", "Result", "Trial", "Verdict"]


class Measure(Protocol):
    def __call__(
        self, algorithms: Algorithms, *, steps: int, timeout: float, batch_size: int | None = None
    ) -> Outcome: ...


@dataclass(frozen=True)
class Bench:
    """What a search needs of the world; tests put in their own.

    Attributes:
        measure: One trial, which ends within its ``timeout`` in seconds, or two more to say where it is.
        refusal: Why a set would be refused before anything is built, or None.
        steps: First outcome of the given run → steps of the planned run.
        now: A clock, in seconds.
        tell: Takes each line of progress.
    """

    measure: Measure
    refusal: Callable[[Algorithms], str | None]
    steps: Callable[[Outcome], int]
    now: Callable[[], float]
    tell: Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    label: str
    algorithms: Algorithms
    steps: int
    batch_size: int | None
    outcome: Outcome
    planned_seconds: float


@dataclass
class Verdict:
    """What became of a candidate.

    Attributes:
        state: ``open`` before its trial; ``refused`` without a trial; ``failed`` in it; ``measured``; ``untried``:
            no time, or not allowed.
        reason: One line, where it was not measured.
        alone: On top of the given run alone.
        alone_seconds: Planned time of that.
        stacked: Planned times without and with it, on top of what had been chosen before.
    """

    candidate: Candidate
    state: Literal["open", "refused", "failed", "measured", "untried"] = "open"
    reason: str = ""
    alone: Outcome | None = None
    alone_seconds: float | None = None
    stacked: tuple[float, float] | None = None


@dataclass
class Result:
    """All that a YAML and its log say.

    Attributes:
        given: Techniques of the given run that engage here.
        planned_steps: Steps of the planned run.
        trial_steps: Steps of a trial.
        baseline: First runs of the given set.
        noise: Seconds by which planned times must differ to count.
        chosen: The winner; the given set itself where nothing beat it.
        kept_given: Why, where it did not.
        without: Technique of the chosen set → planned time of the set without it, or why it cannot be without it.
        pairs: Planned times of the given and the chosen set, run in turn at the end.
        sizes: Batch size → outcome of the chosen set.
        unengaged: Techniques of the given YAML that are not in force here, and why.
        never: Techniques that no candidate holds, and why.
        seconds: Time that it all took.
    """

    given: dict[str, Any]
    planned_steps: int = 0
    trial_steps: int = 0
    baseline: list[Outcome] = field(default_factory=list)
    base_seconds: float = 0.0
    noise: float = 0.0
    chosen: dict[str, Any] = field(default_factory=dict)
    kept_given: str | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    without: dict[str, float | str] = field(default_factory=dict)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    sizes: dict[int, Outcome] = field(default_factory=dict)
    unengaged: dict[str, str] = field(default_factory=dict)
    never: dict[str, str] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def typical(self) -> Outcome:
        """The run of the given set that is nearest their median."""

        def distance(outcome: Outcome) -> float:
            return abs(planned_seconds(outcome, self.planned_steps) - self.base_seconds)

        return min(self.baseline, key=distance)

    @property
    def speedup(self) -> float | None:
        """Planned time of the given set over that of the chosen one, medians of the pairs; None without pairs."""
        if not self.pairs or self.kept_given is not None:
            return None
        given, chosen = zip(*self.pairs, strict=True)
        return statistics.median(given) / statistics.median(chosen)


def by_gain(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Those that were measured alone, the shortest planned time first."""
    measured = [v for v in verdicts if v.state == "measured"]
    return sorted(measured, key=lambda v: v.alone_seconds or 0.0)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON and YAML: mappings as dicts."""
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in settings.items()}
