"""Figures that set the suite beside its peers: steady steps, whole jobs from process start to end, and their start."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.figures import rows_of, where_of
from benchmarks.rows import median_step

__all__ = ["jobs", "kernels", "starts", "steps"]

Row = dict[str, Any]


def steps(table: str) -> list[str]:
    """Every arm at each batch size: its rate and median step, and how they compare with the first arm's, call by call.

    The rate is of all steady steps together; where a host runs ahead of the GPU, the median step is the host's.
    """
    rows = rows_of(table)
    lines = [
        f"| batch | arm | samples/s | over {rows[0]['arm']} | median step, ms | peak GiB | warm-up s |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch, arm, found, base in _arms(rows):
        lines.append(
            f"| {batch} | {arm} | {_median(found, 'samples_per_sec'):,.0f} | {_ratio(found, base, _rate):.2f} "
            f"| {1e3 * statistics.median(map(median_step, found)):.1f} ({_ratio(base, found, median_step):.2f}) "
            f"| {_median(found, 'peak_memory_gib'):.1f} | {_median(found, 'warmup_seconds'):.0f} |"
        )
    return [*lines, "", where_of(rows)]


def jobs(table: str) -> list[str]:
    """Seconds of each arm from the start of its process to its end, and those of the first arm over them."""
    rows = rows_of(table)
    lines = [
        f"| batch | arm | process, s | {rows[0]['arm']}'s over it | warm-up s | both evaluations, s |",
        "|---|---|---|---|---|---|",
    ]
    for batch, arm, found, base in _arms(rows):
        lines.append(
            f"| {batch} | {arm} | {_median(found, 'process_seconds'):.1f} | {_ratio(base, found, _process):.2f} "
            f"| {_median(found, 'warmup_seconds'):.0f} | {_median(found, 'eval_seconds'):.1f} |"
        )
    return [*lines, "", where_of(rows)]


def starts(table: str) -> list[str]:
    """Where the time from the start of each arm's process to the end of its first step goes; of the last run."""
    rows = rows_of(table)
    phases = ("imports", "data", "model", "first_step")
    lines = [
        f"| arm | to the first step, s | {' | '.join(phase.replace('_', ' ') for phase in phases)} | the rest |",
        "|---" * (len(phases) + 3) + "|",
    ]
    for row in rows:
        spent = [row["startup"][f"{phase}_seconds"] for phase in phases]
        total = row["startup"]["to_first_step_seconds"]
        cells = " | ".join(f"{seconds:.1f}" for seconds in (total, *spent, total - sum(spent)))
        lines.append(f"| {row['arm']} | {cells} |")
    return [*lines, "", where_of(rows)]


def kernels(table: str) -> list[str]:
    """The kernels of the last row with their own options, beside PyTorch's and the time of one copy."""
    row = rows_of(table)[-1]
    lines = ["| kernel | µs | PyTorch's | over it | one copy |", "|---" * 5 + "|"]
    for kernel in row["kernels"]:
        if not kernel["options"]:
            ours, theirs = kernel["us"], kernel["torch_us"]
            lines.append(
                f"| {kernel['name'].replace('_', ' ')} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.2f} "
                f"| {kernel['copy_us']:.0f} |"
            )
    return [*lines, "", where_of([row])]


def _arms(rows: Sequence[Row]) -> Iterator[tuple[int, str, list[Row], list[Row]]]:
    """Batch size, arm, its rows there, and those of the first arm of all; arms in the order of the table."""
    places = dict.fromkeys((row["data.batch_size"], row["arm"]) for row in rows)
    for batch, arm in sorted(places, key=lambda place: place[0]):
        there = [row for row in rows if row["data.batch_size"] == batch]
        yield batch, arm, *([row for row in there if row["arm"] == name] for name in (arm, rows[0]["arm"]))


def _ratio(base: Sequence[Row], found: Sequence[Row], measure: Callable[[Row], float]) -> float:
    """The measure of the one over that of the other, in the calls that ran both."""
    first = {row["call"]: measure(row) for row in base}
    return statistics.median(first[row["call"]] / measure(row) for row in found if row["call"] in first)


def _rate(row: Row) -> float:
    return float(row["samples_per_sec"]["median"])


def _process(row: Row) -> float:
    return float(row["process_seconds"]["median"])


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median(value for row in rows for value in row[name]["runs"])
