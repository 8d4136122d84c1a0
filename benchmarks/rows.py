"""Rows of a table: the medians of an arm's runs with their spread, and the rows as Markdown."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import Arm

__all__ = ["RESULTS", "Row", "append_rows", "markdown", "row_of", "spell"]

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
    "wall_seconds": ("wall_seconds",),
    "process_seconds": ("process_seconds",),  # of a cold process, by the runner's clock
}


_TIMES = [n for n, path in _MEASURED.items() if path[0] == "throughput" or n in ("wall_seconds", "process_seconds")]


def append_rows(rows: Sequence[Row], name: str, results: Path = RESULTS) -> Path:
    """Append to ``<results>/<gpu>/<name>.jsonl``, or ``cpu`` where no row has a GPU; returns that file."""
    gpu = next((row["environment"]["gpu"] for row in rows if row["environment"]), None) or "cpu"
    folder = results / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def row_of(table: str, call: str, arm: Arm, reports: Sequence[Row], jobs: int = 1) -> Row:
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
        **arm.point,
        **dict.fromkeys(_MEASURED),
        **{name: _spread([_find(r, path) for r in good]) for name, path in measured.items()},
        "step_seconds_p10_p50_p90": [_find(r, ("throughput", "step_seconds_p10_p50_p90")) for r in good],
        "repeats": len(reports),
        "jobs": jobs,
        "errors": [r["error"] for r in reports if "error" in r],
        "startup": last.get("startup", {}),
        "algorithms": last.get("algorithms", {}),
        "numerics": last.get("numerics", {}),
        "overrides": arm.overrides,
        "environment": last.get("environment", {}),
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


def spell(point: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as a Markdown table, speed-up over the first arm of each point."""
    yield "| arm | point | samples/s (least–most) | ratio | peak GiB | warm-up s |"
    yield "|---|---|---|---|---|---|"
    first: dict[str, float] = {}
    for row in rows:
        point = spell({k: v for k, v in row.items() if "." in k})
        rate, memory, warmup = (row[k] for k in ("samples_per_sec", "peak_memory_gib", "warmup_seconds"))
        if rate is None:
            accuracy = row["accuracy"]
            said = f"accuracy {accuracy['median']:.4f}" if accuracy else "failed"
            yield f"| {row['arm']} | {point} | {said} | | | |"
            continue
        base = first.setdefault(point, rate["median"])
        yield (
            f"| {row['arm']} | {point} | {rate['median']:,.0f} ({rate['min']:,.0f}–{rate['max']:,.0f}) "
            f"| {rate['median'] / base:.2f} | {memory['median']:.1f} | {warmup['median']:.1f} |"
        )
