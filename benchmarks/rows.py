"""Rows of a table: the median and spread of a configuration's runs, and the file that collects them.

A table's rows are in ``results/<gpu>/<table>.jsonl``, one per configuration and point of the matrix. Rows of one call
have the same time in ``call``. The file is rewritten atomically after every run. Until a call is finished, its rows
have a key ``unfinished``, which identifies the call that can be resumed; it is removed from rows that are committed.

Where a table has old and new rows, :func:`newest` says which are shown.
"""

from __future__ import annotations

import io
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.table_file import Configuration
from composer_speedups.core.files import LockedFileError, lock_file, write_atomically
from composer_speedups.sweep.processes import Ended, own_line

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
_MEASURED = {  # name in a row → path in the report
    "samples_per_sec": ("throughput", "samples_per_sec"),
    "tokens_per_sec": ("throughput", "tokens_per_sec"),
    "step_seconds": ("throughput", "step_seconds"),
    "data_seconds": ("throughput", "data_seconds"),
    "warmup_seconds": ("throughput", "warmup_seconds"),
    "peak_memory_gib": ("memory", "peak_gib"),
    "accuracy": ("metrics", "accuracy"),
    "loss": ("metrics", "loss"),
    "train_loss": ("metrics", "train_loss"),
    "eval_seconds": ("throughput", "eval_seconds"),
    "run_seconds": ("run_seconds",),  # duration of a run without its imports
    "process_seconds": ("process_seconds",),  # duration of a cold process
}
_TIMES = [n for n, path in _MEASURED.items() if path[0] == "throughput" or n in ("run_seconds", "process_seconds")]
_OUTPUT_KEPT = 2000  # kept characters of a failed run's output
_CELL = 118  # characters of an error in a table's cell


def call_time() -> str:
    """The current time in the form of ``call``, which identifies the rows of one call."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def folder_of(gpu: str | None, results: Path = RESULTS) -> Path:
    """The folder for the rows of a GPU (``cpu`` for None); created if necessary."""
    folder = results / re.sub(r"[^a-z0-9]+", "-", (gpu or "cpu").lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; empty if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_row(row: Row, name: str, results: Path = RESULTS) -> None:
    """Append a row to ``<results>/<gpu>/<name>.jsonl``."""
    path = folder_of(row["environment"]["gpu"], results) / f"{name}.jsonl"
    _write(path, [*read_rows(path), row])


def _write(path: Path, rows: Sequence[Row]) -> None:
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def empty_row(table: str, call: str, configuration: Configuration, jobs: int = 1) -> Row:
    """The row of a configuration before its first run."""
    return {
        "table": table,
        "call": call,
        "configuration": configuration.name,
        "peer": configuration.peer,
        "warm": configuration.warm,
        "ranks": configuration.ranks,
        **configuration.point,
        **dict.fromkeys(_MEASURED),
        "step_seconds_p10_p50_p90": [],
        "repeats": 0,
        "jobs": jobs,
        "errors": [],
        "error_kinds": [],
        "startup": {},
        "algorithms": {},
        "numerics": {},
        "overrides": configuration.overrides,
        "environment": {},
        **({"published": configuration.published} if configuration.published else {}),
    }


def add_run(row: Row, report: Row) -> None:
    """Add a run's report to its row; runs that shared the machine (``jobs`` above 1) have no times."""
    row["repeats"] += 1
    if "error" in report:
        row["errors"].append(report["error"])
        row["error_kinds"].append(report.get("error_kind", "failed"))
        return
    for name, path in _MEASURED.items():
        value = _find(report, path)
        if value is not None and (row["jobs"] == 1 or name not in _TIMES):
            runs = [*(row[name]["runs"] if row[name] else []), value]
            row[name] = {"median": statistics.median(runs), "min": min(runs), "max": max(runs), "runs": runs}
    row["step_seconds_p10_p50_p90"].append(_find(report, ("throughput", "step_seconds_p10_p50_p90")))
    row.update({name: report.get(name, {}) for name in ("startup", "algorithms", "numerics", "environment")})
    if "losses" in report:
        row["losses"] = report["losses"]
    if row["jobs"] == 1 and report.get("evaluations"):
        row.setdefault("evaluations", []).append(report["evaluations"])  # of each run: batch, seconds, metrics


def _find(report: Row, path: tuple[str, ...]) -> Any:
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def lock_table(path: Path) -> io.FileIO:
    """Keep other processes from running the table of this file, until the returned file is closed."""
    try:
        return lock_file(path.with_name(f".{path.stem}.lock"), "table")
    except LockedFileError as error:
        raise SystemExit(f"{path}: another process is running this table; wait for it to end") from error


class Call:
    """The rows of one call in a table's file, which may continue the file's last call.

    ``identity`` is a digest of what must be the same to continue a call.
    """

    def __init__(self, path: Path, rows: Sequence[Row], identity: str, *, resume: bool = False) -> None:
        self.rows, self._path, self._identity = list(rows), path, identity
        self._earlier = read_rows(path)
        begun = [row.pop("unfinished", None) for row in self._earlier][-1:]
        if resume and any(begun):
            self._resume(begun == [identity])

    def _resume(self, same: bool) -> None:
        call = self._earlier[-1]["call"]
        if not same:
            raise SystemExit(
                f"{self._path}: the call of {call} had other configurations, overrides or code; use the same again, "
                "or remove resume=true to keep its runs as rows and start a new call"
            )
        kept = {(row["configuration"], spell(point_of(row))): row for row in self._earlier if row["call"] == call}
        self.rows = [kept.get((row["configuration"], spell(point_of(row))), {**row, "call": call}) for row in self.rows]
        self._earlier = [row for row in self._earlier if row["call"] != call]
        print(f"continues the call of {call}, {sum(row['repeats'] for row in self.rows)} runs of it done", flush=True)

    def add(self, index: int, report: Row) -> None:
        """Add a run's report to the row with this index and write the file."""
        add_run(self.rows[index], report)
        self._write({"unfinished": self._identity})

    def finish(self) -> list[Row]:
        """Mark the call as finished and return its rows."""
        self._write({})
        return self.rows

    def _write(self, more: Row) -> None:
        _write(self._path, [*self._earlier, *({**row, **more} for row in self.rows if row["repeats"])])


def error_report(ended: Ended) -> Row:
    """The report of a failed run: ``error`` and ``error_kind``, of which :class:`.Ended` knows the kinds."""
    return {"error": f"exit status {ended.status}: {ended.output.strip()[-_OUTPUT_KEPT:]}", "error_kind": ended.kind}


def describe_error(error: str, error_kind: str = "failed") -> str:
    """The kind of an error, and its most informative line: train.py's own, or else the last one."""
    return error_kind if error_kind == "out of memory" else f"{error_kind}: {own_line(error) or 'no output'}"


def describe_errors(row: Row) -> str:
    """The failed runs of a row, for a table's cell; empty if there are none."""
    errors, kinds = row["errors"], Counter[str](row.get("error_kinds", ()))
    if not errors:
        return ""
    kind, count = kinds.most_common(1)[0]
    said = describe_error(errors[row["error_kinds"].index(kind)], kind).replace("|", "/")
    said = said if len(said) <= _CELL else said[:_CELL].rsplit(" ", 1)[0] + " …"
    return said if len(errors) == row["repeats"] == count else f"{len(errors)} of {row['repeats']} runs {said}"


def median_step(row: Row) -> float:
    """The median step time of a row's runs in seconds."""
    return statistics.median(p50 for _, p50, _ in filter(None, row["step_seconds_p10_p50_p90"]))


def newest(rows: Sequence[Row]) -> list[Row]:
    """The rows that a table shows of old and new ones: of the calls at the commit and on the GPU of the last call."""
    last = max(rows, key=lambda row: (row["call"], bool(row["environment"])), default=None)
    calls = {row["call"] for row in rows if last and _measured_on(row) == _measured_on(last)}
    return [row for row in rows if row["call"] in calls]


def _measured_on(row: Row) -> tuple[Any, Any]:
    return row["environment"].get("commit"), row["environment"].get("gpu")


def point_of(row: Row) -> Row:
    """A row's point in the matrix of its table: the keys with a dot, and ``seed``."""
    return {key: value for key, value in row.items() if "." in key or key == "seed"}


def spell(point: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())
