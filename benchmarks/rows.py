"""Rows of a table: the medians of an arm's runs with their spread, and the file that they are kept in."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.table import Arm
from composer_speedups.core.files import write_atomically

__all__ = ["RESULTS", "Row", "call_time", "folder_of", "keep_rows", "median_step", "point_of", "row_of", "spell"]

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
_MEASURED = {  # name in a row → where the report has it
    "samples_per_sec": ("throughput", "samples_per_sec"),
    "tokens_per_sec": ("throughput", "tokens_per_sec"),
    "mfu": ("throughput", "mfu"),
    "step_seconds": ("throughput", "step_seconds"),
    "data_seconds": ("throughput", "data_seconds"),
    "warmup_seconds": ("throughput", "warmup_seconds"),
    "peak_memory_gib": ("memory", "peak_gib"),
    "accuracy": ("metrics", "accuracy"),
    "loss": ("metrics", "loss"),
    "train_loss": ("metrics", "train_loss"),
    "eval_seconds": ("throughput", "eval_seconds"),
    "run_seconds": ("run_seconds",),  # from its turn to its end, by the runner's clock; imports were done before
    "process_seconds": ("process_seconds",),  # of a cold process, by the runner's clock
}


_TIMES = [n for n, path in _MEASURED.items() if path[0] == "throughput" or n in ("run_seconds", "process_seconds")]


def call_time() -> str:
    """Now, as ``call`` has it: rows of one call are told from another's by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def folder_of(gpu: str | None, results: Path = RESULTS) -> Path:
    """Where the rows of a GPU are kept, ``cpu`` for None; made if it is not there."""
    folder = results / re.sub(r"[^a-z0-9]+", "-", (gpu or "cpu").lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def keep_rows(rows: Sequence[Row], name: str, results: Path = RESULTS) -> Path:
    """Add the rows of one call to ``<results>/<gpu>/<name>.jsonl``, ``cpu`` where no row has a GPU; returns that file.

    Rows that are there from the same call, which was stopped then, make way.
    """
    gpu = next((row["environment"]["gpu"] for row in rows if row["environment"]), None)
    path = folder_of(gpu, results) / f"{name}.jsonl"
    calls = {row["call"] for row in rows}
    lines = path.read_text().splitlines() if path.exists() else []
    lines = [line for line in lines if json.loads(line)["call"] not in calls] + [json.dumps(row) for row in rows]
    if lines:
        write_atomically(path, "".join(f"{line}\n" for line in lines))
    return path


def row_of(table: str, call: str, arm: Arm, reports: Sequence[Row], jobs: int = 1, published: str | None = None) -> Row:
    """What is kept of an arm: medians with their spread, evidence, and where it ran.

    Runs that shared the machine (``jobs`` above 1) say nothing about speed, and their times are left out.
    """
    good = [r for r in reports if "error" not in r]
    measured = {name: path for name, path in _MEASURED.items() if jobs == 1 or name not in _TIMES}
    last = good[-1] if good else {}
    return {
        "table": table,
        "call": call,
        "arm": arm.name,
        "peer": arm.peer,
        "warm": arm.warm,
        "ranks": arm.ranks,
        **arm.point,
        **dict.fromkeys(_MEASURED),
        **{name: _spread([_find(r, path) for r in good]) for name, path in measured.items()},
        "step_seconds_p10_p50_p90": [_find(r, ("throughput", "step_seconds_p10_p50_p90")) for r in good],
        "repeats": len(reports),
        "jobs": jobs,
        "errors": [r["error"] for r in reports if "error" in r],
        "error_kinds": [r.get("error_kind", "failed") for r in reports if "error" in r],
        "startup": last.get("startup", {}),
        "algorithms": last.get("algorithms", {}),
        "numerics": last.get("numerics", {}),
        "overrides": arm.overrides,
        "environment": last.get("environment", {}),
        **({"published": published} if published else {}),
        **({"losses": last["losses"]} if "losses" in last else {}),
    }


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = [v for v in values if v is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known), "runs": known}


def _find(report: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def median_step(row: Row) -> float:
    """The median step of a row's runs, seconds.

    Raises:
        statistics.StatisticsError: None of them came to a step.
    """
    return statistics.median(p50 for _, p50, _ in filter(None, row["step_seconds_p10_p50_p90"]))


def point_of(row: Row) -> dict[str, Any]:
    """A row's place in the matrix of its table: config keys, which have a dot but for ``seed``."""
    return {key: value for key, value in row.items() if "." in key or key == "seed"}


def spell(point: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())
