"""What is known of a run's samples before training, for the console and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_MOST_LISTED = 10  # invalid rows that messages and the report describe


@dataclass(frozen=True)
class DroppedRows:
    """Invalid rows that ``data.on_invalid: drop`` left out."""

    where: str  # the file or dataset with its config key
    rows: int  # with the invalid ones
    problems: Sequence[str]  # such as: row 6: text is empty; every sample needs text

    def __str__(self) -> str:
        return f"{len(self.problems):,} of {self.rows:,} rows of {self.where} ({_listed(self.problems)})"

    def report(self) -> dict[str, Any]:
        first = [_without_advice(problem) for problem in self.problems[:_MOST_LISTED]]
        return {"source": self.where, "rows": self.rows, "dropped": len(self.problems), "first": first}


@dataclass(frozen=True)
class Truncation:
    """How many training samples ``data.max_length`` truncates."""

    fraction: float  # of the samples
    length_for_95_percent: int  # the max_length that would keep 95% of them whole
    exact: bool  # all samples were measured, and not a part of them

    def __str__(self) -> str:
        if self.exact and not self.fraction:
            return "no sample is truncated"
        about = "" if self.exact else "about "
        share = f"{about}{self.fraction:.0%}" if self.fraction >= 0.01 else f"{about}{self.fraction:.1%}"
        longer = f"; {self.length_for_95_percent:,} tokens would keep 95% whole" if self.fraction > 0.05 else ""
        return f"{share} of the samples are truncated{longer}"


@dataclass
class DataSummary:
    """Filled while the data is built."""

    dropped: list[DroppedRows] = field(default_factory=list)
    truncation: Truncation | None = None  # None for samples that are streamed, packed or random tokens

    def report(self) -> dict[str, Any]:
        """The section ``data`` of report.json."""
        truncation = None if self.truncation is None else asdict(self.truncation)
        return {"dropped": [rows.report() for rows in self.dropped], "truncation": truncation}

    def lines(self) -> dict[str, str]:
        """Name → text of the lines that a run prints before training."""
        return {"dropped": "; ".join(map(str, self.dropped))} if self.dropped else {}


def invalid_rows(where: str, rows: int, problems: Sequence[str], fix: str) -> str:
    """An error message that counts the invalid rows of ``rows``, describes the first ten, and names the fix."""
    if len(problems) == 1:
        return f"{where}, {problems[0]}; {fix}"
    advice = dict.fromkeys(problem.rpartition("; ")[2] for problem in problems if "; " in problem)
    invalid = f"{len(problems):,} of {rows:,} rows are invalid ({_listed(problems)})"
    return "; ".join([f"{where}: {invalid}", *advice, fix])


def _listed(problems: Sequence[str]) -> str:
    return ", ".join(map(_without_advice, problems[:_MOST_LISTED])) + (", …" if len(problems) > _MOST_LISTED else "")


def _without_advice(problem: str) -> str:
    return problem.rpartition("; ")[0] or problem
