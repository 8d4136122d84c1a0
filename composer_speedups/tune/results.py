"""What trials show, what it means for the planned run, and what a search found. All times in seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from composer_speedups.tune.candidates import Candidate

__all__ = ["Algorithms", "Outcome", "Result", "Trial", "Verdict", "break_even_steps", "noise_of"]

Algorithms = Mapping[str, Mapping[str, Any]]
"""YAML name → settings, as in a config."""


@dataclass(frozen=True)
class Outcome:
    """One training process.

    Attributes:
        status: ``ok``; ``refused`` by the run itself, in one line; ``memory``: it ran out of it; ``time``: it was
            ended at the limit; ``failed`` otherwise.
        reason: One line, for all but ``ok``.
        step_seconds: Mean of the steady steps, waiting for data included.
        start_seconds: From the built data to the steady state: engaging, compiling, capturing, warm-up batches.
        other_batches: Batches that ``start_seconds`` holds.
        samples_per_sec: Of the steady state.
        peak_gib: Of the GPU; the process's resident memory on a CPU.
        tokens_per_step: Real ones, mean.
        wall_seconds: The whole process, from outside.
        evidence: Technique → what it left as evidence.
        unengaged: Technique → why it was asked for (with ``on_unavailable: warn``) but is not in force.
    """

    status: Literal["ok", "refused", "memory", "time", "failed"]
    reason: str = ""
    step_seconds: float = math.nan
    start_seconds: float = 0.0
    other_batches: int = 0
    samples_per_sec: float = math.nan
    peak_gib: float | None = None
    tokens_per_step: float = math.nan
    wall_seconds: float = 0.0
    evidence: Mapping[str, Any] = field(default_factory=dict)
    unengaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def planned_seconds(self, steps: int) -> float:
        """Estimated training time of ``steps`` steps: the start once, then steady steps. Infinite if it did not run.

        Imports, the data, evaluations and checkpoints are left out: they are much the same for all.
        """
        if not self.ok:
            return math.inf
        return self.start_seconds + max(0, steps - self.other_batches) * self.step_seconds


def break_even_steps(base: Outcome, other: Outcome) -> int | None:
    """Steps after which ``other`` has made up for its longer start; 0 when it starts no later, None for never."""
    saved = base.step_seconds - other.step_seconds
    # Batches of the start are steps done: they count for whoever did more of them meanwhile.
    extra = (other.start_seconds - other.other_batches * other.step_seconds) - (
        base.start_seconds - base.other_batches * base.step_seconds
    )
    return max(0, math.ceil(extra / saved)) if saved > 0 else None


def noise_of(seconds: Sequence[float], min_gain: float) -> float:
    """What two planned times must differ by to count: the spread of equal runs, and at least ``min_gain`` of them."""
    return max(max(seconds) - min(seconds), min_gain * statistics.median(seconds))


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
        base_seconds: Median planned time of these.
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
        return min(self.baseline, key=lambda o: abs(o.planned_seconds(self.planned_steps) - self.base_seconds))

    @property
    def speedup(self) -> float | None:
        """Planned time of the given set over that of the chosen one, medians of the pairs; None without pairs."""
        if not self.pairs or self.kept_given is not None:
            return None
        given, chosen = zip(*self.pairs, strict=True)
        return statistics.median(given) / statistics.median(chosen)
