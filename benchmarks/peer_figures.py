"""Figures that set the suite beside its peers: steady steps, and whole jobs from process start to end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.figures import rows_of, where_of

__all__ = ["jobs", "steps"]

Row = dict[str, Any]


def steps(table: str) -> list[str]:
    """Every arm at each batch size: mean rate, median step, and that of the first arm over it, call by call."""
    rows = rows_of(table)
    first = rows[0]["arm"]
    lines = [
        f"| batch | arm | samples/s | median step, ms | {first}'s over it | peak GiB | warm-up s |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch, arm in _places(rows):
        found = [row for row in rows if (row["data.batch_size"], row["arm"]) == (batch, arm)]
        base = {row["call"]: _step(row) for row in rows if (row["data.batch_size"], row["arm"]) == (batch, first)}
        ratio = statistics.median(base[row["call"]] / _step(row) for row in found if row["call"] in base)
        lines.append(
            f"| {batch} | {arm} | {_median(found, 'samples_per_sec'):,.0f} "
            f"| {1e3 * statistics.median(map(_step, found)):.1f} | {ratio:.2f} "
            f"| {_median(found, 'peak_memory_gib'):.1f} | {_median(found, 'warmup_seconds'):.0f} |"
        )
    return [*lines, "", where_of(rows)]


def jobs(table: str) -> list[str]:
    """Seconds of each arm from the start of its process to its end, and those of the first arm over them."""
    rows = rows_of(table)
    first = rows[0]["arm"]
    lines = [
        f"| batch | arm | process, s | {first}'s over it | warm-up s | both evaluations, s |",
        "|---|---|---|---|---|---|",
    ]
    for batch, arm in _places(rows):
        found = [row for row in rows if (row["data.batch_size"], row["arm"]) == (batch, arm)]
        base = [row for row in rows if (row["data.batch_size"], row["arm"]) == (batch, first)]
        seconds = _median(found, "process_seconds")
        lines.append(
            f"| {batch} | {arm} | {seconds:.1f} | {_median(base, 'process_seconds') / seconds:.2f} "
            f"| {_median(found, 'warmup_seconds'):.0f} | {_median(found, 'eval_seconds'):.1f} |"
        )
    return [*lines, "", where_of(rows)]


def _places(rows: Sequence[Row]) -> list[tuple[int, str]]:
    places = dict.fromkeys((row["data.batch_size"], row["arm"]) for row in rows)
    return sorted(places, key=lambda place: place[0])  # arms stay in the order of the table


def _step(row: Row) -> float:
    """The median step of a row's runs, seconds."""
    return statistics.median(p50 for _, p50, _ in filter(None, row["step_seconds_p10_p50_p90"]))


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median(value for row in rows for value in row[name]["runs"])
