"""The results of trials, their meaning for the planned run, and the result of a search. All times are in seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_speedups.tune.candidates import Algorithms, Candidate

__all__ = ["Outcome", "Result", "Trial", "Verdict", "break_even_steps", "noise_of"]


@dataclass(frozen=True)
class Outcome:
    """The result of one training process."""

    # refused: by the run itself; memory: out of memory; time: killed at the timeout
    status: Literal["ok", "refused", "memory", "time", "failed"]
    reason: str = ""  # one line; empty for ok
    step_seconds: float = math.nan  # mean of the steady steps, including waiting for data
    start_seconds: float = 0.0  # from loaded data to the steady state: engaging, compiling, capturing, warm-up
    other_batches: int = 0  # number of steps in start_seconds
    samples_per_sec: float = math.nan  # in the steady state
    peak_gib: float | None = None  # of the GPU, or resident memory on a CPU
    tokens_per_step: float = math.nan  # mean number of real tokens per step
    wall_seconds: float = 0.0  # duration of the whole process
    evidence: Mapping[str, Any] = field(default_factory=dict)  # technique → its evidence
    # technique with on_unavailable: warn → why it did not engage
    unengaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def planned_seconds(self, steps: int) -> float:
        """Estimated training time of ``steps`` steps: the start once, then steady steps. Infinite if the trial failed.

        Imports, loading data, evaluations and checkpoints are not included, because they hardly depend on the
        techniques.
        """
        if not self.ok:
            return math.inf
        return self.start_seconds + max(0, steps - self.other_batches) * self.step_seconds


def break_even_steps(base: Outcome, other: Outcome) -> int | None:
    """Number of steps after which ``other`` has made up for its longer start; 0 if it starts as fast, None for
    never."""
    saved = base.step_seconds - other.step_seconds
    # Batches of the start are trained steps too, and both may have trained different numbers of them.
    extra = (other.start_seconds - other.other_batches * other.step_seconds) - (
        base.start_seconds - base.other_batches * base.step_seconds
    )
    return max(0, math.ceil(extra / saved)) if saved > 0 else None


def noise_of(seconds: Sequence[float], min_gain: float) -> float:
    """The least difference of planned times that counts: the spread of equal runs, and at least ``min_gain`` of
    them."""
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
    """The result for a candidate."""

    candidate: Candidate
    # open before its trial; refused without a trial; failed in it; untried: no time, or not allowed
    state: Literal["open", "refused", "failed", "measured", "untried"] = "open"
    reason: str = ""  # one line, if it was not measured
    alone: Outcome | None = None  # added to the original run
    alone_seconds: float | None = None  # planned time of that run
    # planned times without and with it, added to the techniques chosen so far
    stacked: tuple[float, float] | None = None


@dataclass
class Result:
    """Everything that the YAML and its log contain."""

    original: dict[str, Any]  # techniques of the original run that engage here
    planned_steps: int = 0
    trial_steps: int = 0
    baseline: list[Outcome] = field(default_factory=list)  # first trials of the original set
    base_seconds: float = 0.0  # their median planned time
    noise: float = 0.0  # least difference of planned times that counts
    chosen: dict[str, Any] = field(default_factory=dict)  # the original set if nothing was faster
    kept_original: str | None = None  # why nothing was faster
    verdicts: list[Verdict] = field(default_factory=list)
    # chosen technique → planned time without it, or why there is none
    without: dict[str, float | str] = field(default_factory=dict)
    # planned times of the original and the chosen set, run in turns
    pairs: list[tuple[float, float]] = field(default_factory=list)
    sizes: dict[int, Outcome] = field(default_factory=dict)  # batch size → outcome with the chosen set
    # techniques of the original YAML that do not engage here → why
    unengaged: dict[str, str] = field(default_factory=dict)
    never: dict[str, str] = field(default_factory=dict)  # techniques without candidates → why
    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0  # duration of the search

    @property
    def typical(self) -> Outcome:
        """The trial of the original set that is closest to the median."""
        return min(self.baseline, key=lambda o: abs(o.planned_seconds(self.planned_steps) - self.base_seconds))

    @property
    def speedup(self) -> float | None:
        """Median planned time of the original set divided by that of the chosen set; None without pairs."""
        if not self.pairs or self.kept_original is not None:
            return None
        original, chosen = zip(*self.pairs, strict=True)
        return statistics.median(original) / statistics.median(chosen)
