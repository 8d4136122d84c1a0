"""python -m benchmarks.run TABLE [key=value ...]: run a table's arms, each in a process of its own; keep the rows.

A table is a YAML file under benchmarks/tables (its name without .yaml will do)::

    base: yamls/bert_imdb_fp32.yaml   # config of every arm
    set: [trainer.max_duration=60ba]  # overrides of every arm
    repeats: 3                        # runs of every arm; arms take turns
    matrix: {data.batch_size: [40, 128]}  # every arm at every value
    cumulative: true                  # an arm keeps the overrides of those above it
    jobs: 4                           # runs at a time; for accuracy: speeds are then left out of the rows
    ahead: 8                          # processes that import at once and then wait for their turn
    arms: {fp32: [], + TF32: ["algorithms.tf32_matmul={}"]}

On the command line, repeats=2, jobs=1, ahead=1 and data.batch_size=40 replace the table's own, "arms=[fp32, + TF32]"
runs those only (the first is what the others are compared with), and other overrides come last. Rows are appended to
benchmarks/results/<gpu>/<table>.jsonl, one an arm and point of the matrix, with the median, least and greatest
of its runs; rows of one call have one time in ``call``, and only those compare. A failed run leaves its error.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.worker import Workers

__all__ = ["Arm", "arms_of", "read_table", "row_of", "run_table"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
_KNOWN = {"base", "set", "repeats", "matrix", "cumulative", "jobs", "ahead", "arms"}
_QUIET = ["trainer.progress_bar=false", "export=false", "plot=false"]
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
    "wall_seconds": ("wall_seconds",),
}


_TIMES = [n for n, path in _MEASURED.items() if path[0] == "throughput" or n == "wall_seconds"]


class Arm(NamedTuple):
    name: str
    point: dict[str, Any]  # its place in the matrix
    overrides: list[str]


def arms_of(table: Row) -> list[Arm]:
    """Every arm at every point of the matrix."""
    matrix = table.get("matrix", {})
    points = [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]
    arms = []
    for point in points:
        kept: list[str] = []
        for name, own in table["arms"].items():
            kept = kept + list(own) if table.get("cumulative") else list(own)
            placed = [f"{key}={json.dumps(value)}" for key, value in point.items()]
            if name in (table.get("only") or table["arms"]):
                arms.append(Arm(name, point, [*table.get("set", []), *placed, *kept, *table.get("last", [])]))
    return arms


def run_table(table: Row, name: str, results: Path = RESULTS) -> list[Row]:
    """Run all arms in turn, ``repeats`` times over, and append a row for each that ran, also when stopped."""
    arms, repeats, jobs = arms_of(table), table.get("repeats", 1), table.get("jobs", 1)
    runs: list[list[Row]] = [[] for _ in arms]
    started, call = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    stopped, workers = threading.Event(), Workers(table.get("ahead", 1))

    def run(repeat: int, index: int) -> None:
        if stopped.is_set():
            return
        try:
            report = run_once(table["base"], arms[index].overrides, workers)
        except BaseException:
            stopped.set()
            raise
        runs[index].append(report)
        done = f"{time.monotonic() - started:5.0f} s  {repeat + 1}/{repeats}"
        print(f"{done}  {arms[index].name} {_spell(arms[index].point)} {_said(report)}", flush=True)

    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = [pool.submit(run, repeat, i) for repeat in range(repeats) for i in range(len(arms))]
        for future in waiting:
            future.result()
    finally:
        stopped.set()
        workers.close()
        pool.shutdown(cancel_futures=True)
        rows = [row_of(name, call, arm, own, jobs) for arm, own in zip(arms, runs, strict=True) if own]
        gpu = next((r["environment"]["gpu"] for r in rows if r["environment"]), None) or "cpu"
        folder = results / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def _said(report: Row) -> str:
    if "error" in report:
        return str(report["error"]).splitlines()[-1]
    throughput, accuracy = report["throughput"], report["metrics"].get("accuracy")
    if accuracy is not None:
        return f"accuracy {accuracy:.4f}"
    return f"{throughput['samples_per_sec']:,.0f} samples/s, warm-up {throughput['warmup_seconds']:.0f} s"


def read_table(path: Path, overrides: Sequence[str] = ()) -> Row:
    """The table; overrides replace ``repeats`` and axes of the matrix, pick arms, and others go to every arm."""
    table = yaml.safe_load(path.read_text())
    unknown = set(table) - _KNOWN
    if unknown or not {"base", "arms"} <= set(table):
        raise SystemExit(f"{path}: needs base and arms; may have {', '.join(sorted(_KNOWN))}")
    table["last"] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in ("repeats", "jobs", "ahead"):
            table[key] = int(value)
        elif key == "arms":
            table["only"] = yaml.safe_load(value)
            if not isinstance(table["only"], list) or not set(table["only"]) <= set(table["arms"]):
                raise SystemExit(f"arms={value}: must be a list of {', '.join(table['arms'])}")
        elif key in table.get("matrix", {}):
            table["matrix"][key] = [yaml.safe_load(value)]
        else:
            table["last"].append(override)
    return table


def run_once(base: str, overrides: Sequence[str], workers: Workers) -> Row:
    """One training process; its report, or ``{"error": …}``."""
    with tempfile.TemporaryDirectory() as runs:
        arguments = ["-f", str(ROOT / base), *overrides, f"runs_folder={runs}", "run_name=arm", *_QUIET]
        cold = {"TORCHINDUCTOR_CACHE_DIR": f"{runs}/inductor"}  # every run compiles anew
        status, output = workers.run(arguments, cold)
        if status != 0:
            return {"error": f"exit status {status}: {output.strip()[-2000:]}"}
        return json.loads((Path(runs) / "arm" / "report.json").read_text())


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
        **arm.point,
        **dict.fromkeys(_MEASURED),
        **{name: _spread([_find(r, path) for r in good]) for name, path in measured.items()},
        "step_seconds_p10_p50_p90": [_find(r, ("throughput", "step_seconds_p10_p50_p90")) for r in good],
        "repeats": len(reports),
        "jobs": jobs,
        "errors": [r["error"] for r in reports if "error" in r],
        "algorithms": last.get("algorithms", {}),
        "numerics": last.get("numerics", {}),
        "overrides": arm.overrides,
        "environment": last.get("environment", {}),
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


def _spell(point: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as a Markdown table, speed-up over the first arm of each point."""
    yield "| arm | point | samples/s (least–most) | ratio | peak GiB | warm-up s |"
    yield "|---|---|---|---|---|---|"
    first: dict[str, float] = {}
    for row in rows:
        point = _spell({k: v for k, v in row.items() if "." in k})
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


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    path = Path(arguments[0])
    if not path.suffix:
        path = ROOT / "benchmarks" / "tables" / f"{arguments[0]}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (ROOT / "benchmarks" / "tables").glob("*.yaml")))
        raise SystemExit(f"{path}: no such table; there are {known}")
    rows = run_table(read_table(path, arguments[1:]), path.stem)
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
