"""What a trial showed, and what it means for the planned run. All times in seconds."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Algorithms", "Outcome", "break_even_steps", "noise_of", "planned_seconds", "planned_steps"]

Algorithms = Mapping[str, Any]
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


def planned_steps(max_duration: str, batches_per_epoch: int, batch_size: int, tokens_per_step: float) -> int:
    """Optimizer steps of a run of ``max_duration``, a Composer time in ep, ba, sp or tok; at least 1."""
    found = re.fullmatch(r"(\d+)([a-z]+)", max_duration)
    assert found, f"{max_duration} is no time that the config lets through"
    number = int(found[1])
    if found[2] == "ep":
        return max(1, number * batches_per_epoch)
    if found[2] == "ba":
        return number
    per_step = batch_size if found[2] == "sp" else tokens_per_step
    return max(1, math.ceil(number / per_step))


def planned_seconds(outcome: Outcome, steps: int) -> float:
    """Estimated training time of ``steps`` steps: the start once, then steady steps. Infinite for what did not run.

    Imports, the data, evaluations and checkpoints are left out: they are much the same for all.
    """
    if not outcome.ok:
        return math.inf
    return outcome.start_seconds + max(0, steps - outcome.other_batches) * outcome.step_seconds


def break_even_steps(base: Outcome, other: Outcome) -> int | None:
    """Steps after which ``other`` has made up for its longer start; 0 when it starts no later, None for never."""
    saved = base.step_seconds - other.step_seconds
    # Batches of the start are steps done: they count for whoever did more of them meanwhile.
    extra = (other.start_seconds - other.other_batches * other.step_seconds) - (
        base.start_seconds - base.other_batches * base.step_seconds
    )
    if saved <= 0:
        return None
    return max(0, math.ceil(extra / saved))


def noise_of(seconds: Sequence[float], min_gain: float) -> float:
    """What two planned times must differ by to count: the spread of equal runs, and at least ``min_gain`` of them."""
    return max(max(seconds) - min(seconds), min_gain * statistics.median(seconds))
