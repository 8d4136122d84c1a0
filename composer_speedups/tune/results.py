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
    """One training process."""

    # refused: by the run itself; memory: it ran out of it; time: it was ended at the limit.
    status: Literal["ok", "refused", "memory", "time", "failed"]
    reason: str = ""  # one line, for all but ok
    step_seconds: float = math.nan  # mean of the steady steps, waiting for data included
    start_seconds: float = 0.0  # from the built data to the steady state: engaging, compiling, capturing, warm-up
    other_batches: int = 0  # that start_seconds holds
    samples_per_sec: float = math.nan  # of the steady state
    peak_gib: float | None = None  # of the GPU; the process's resident memory on a CPU
    tokens_per_step: float = math.nan  # real ones, mean
    wall_seconds: float = 0.0  # the whole process, from outside
    evidence: Mapping[str, Any] = field(default_factory=dict)  # technique → what it left as evidence
    unengaged: Mapping[str, str] = field(default_factory=dict)  # asked for with on_unavailable: warn → why not in force

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
    """What became of a candidate."""

    candidate: Candidate
    # open before its trial; refused without a trial; failed in it; untried: no time, or not allowed.
    state: Literal["open", "refused", "failed", "measured", "untried"] = "open"
    reason: str = ""  # one line, where it was not measured
    alone: Outcome | None = None  # on top of the original run alone
    alone_seconds: float | None = None  # planned time of that
    stacked: tuple[float, float] | None = None  # planned times without and with it, on top of what was chosen before


@dataclass
class Result:
    """All that a YAML and its log say."""

    original: dict[str, Any]  # techniques of the original run that engage here
    planned_steps: int = 0
    trial_steps: int = 0
    baseline: list[Outcome] = field(default_factory=list)  # first runs of the original set
    base_seconds: float = 0.0  # median planned time of these
    noise: float = 0.0  # seconds by which planned times must differ to count
    chosen: dict[str, Any] = field(default_factory=dict)  # the original set itself where nothing beat it
    kept_original: str | None = None  # why nothing did
    verdicts: list[Verdict] = field(default_factory=list)
    without: dict[str, float | str] = field(
        default_factory=dict
    )  # chosen technique → planned time, or why there is none
    pairs: list[tuple[float, float]] = field(default_factory=list)  # planned times of original and chosen, run in turn
    sizes: dict[int, Outcome] = field(default_factory=dict)  # batch size → outcome of the chosen set
    unengaged: dict[str, str] = field(default_factory=dict)  # techniques of the original YAML not in force here → why
    never: dict[str, str] = field(default_factory=dict)  # techniques that no candidate holds → why
    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0  # that it all took

    @property
    def typical(self) -> Outcome:
        """The run of the original set that is nearest their median."""
        return min(self.baseline, key=lambda o: abs(o.planned_seconds(self.planned_steps) - self.base_seconds))

    @property
    def speedup(self) -> float | None:
        """Planned time of the original set over that of the chosen one, medians of the pairs; None without pairs."""
        if not self.pairs or self.kept_original is not None:
            return None
        original, chosen = zip(*self.pairs, strict=True)
        return statistics.median(original) / statistics.median(chosen)
