"""Rows of a table: the medians of an arm's runs with their spread, and the file that keeps them from run to run.

A table's rows are in ``results/<gpu>/<table>.jsonl``, one an arm and point of the matrix; rows of one call have one
time in ``call``. The file is written anew, whole or not at all, with every run that ends. Until a call is finished, its
rows have a key ``unfinished`` that says what the call is of, by which it can be resumed.
"""

from __future__ import annotations

import fcntl
import json
import re
import statistics
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_speedups.core.files import write_atomically
from composer_speedups.train.failed_process import own_line, ran_out_of_memory

if TYPE_CHECKING:
    from benchmarks.run import Arm

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
_OUTPUT_KEPT = 2000  # characters of a failed run's output
_CELL = 118  # characters of an error in a table's cell


def call_time() -> str:
    """Now, as ``call`` has it: rows of one call are told from another's by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def folder_of(gpu: str | None, results: Path = RESULTS) -> Path:
    """Where the rows of a GPU are kept, ``cpu`` for None; made if it is not there."""
    folder = results / re.sub(r"[^a-z0-9]+", "-", (gpu or "cpu").lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none where there is no file.

    Raises:
        SystemExit: A line is no row.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise SystemExit(f"{path}: line {number} is damaged; move the file away to begin anew") from error
    return rows


def append_row(row: Row, name: str, results: Path = RESULTS) -> None:
    """Add a row to ``<results>/<gpu>/<name>.jsonl``."""
    path = folder_of(row["environment"]["gpu"], results) / f"{name}.jsonl"
    _write(path, [*read_rows(path), row])


def _write(path: Path, rows: Sequence[Row]) -> None:
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def empty_row(table: str, call: str, arm: Arm, jobs: int = 1, published: str | None = None) -> Row:
    """The row of an arm before its first run."""
    return {
        "table": table,
        "call": call,
        "arm": arm.name,
        "peer": arm.peer,
        "warm": arm.warm,
        "ranks": arm.ranks,
        **arm.point,
        **dict.fromkeys(_MEASURED),
        "step_seconds_p10_p50_p90": [],
        "repeats": 0,
        "jobs": jobs,
        "errors": [],
        "error_kinds": [],
        "startup": {},
        "algorithms": {},
        "numerics": {},
        "overrides": arm.overrides,
        "environment": {},
        **({"published": published} if published else {}),
    }


def add_run(row: Row, report: Row) -> None:
    """Count a run's report in its row: medians with their spread, and evidence of the last run without an error.

    Runs that shared the machine (``jobs`` above 1) say nothing about speed, and their times are left out.
    """
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


def _find(report: Row, path: tuple[str, ...]) -> Any:
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


class Call:
    """The rows of one call in a table's file, which it locks: one call of a table at a time.

    Args:
        path: The file; its folder is there.
        rows: Of all arms at all points, empty, in the order of the table.
        identity: What only a call of the same can go on with, by name.
        resume: Go on with the file's last call where that is unfinished.

    Attributes:
        rows: As given, with the runs that have ended, in this process or, of a resumed call, before.

    Raises:
        SystemExit: Another process is running the table, or the unfinished call is of something else than this one.
    """

    def __init__(self, path: Path, rows: Sequence[Row], identity: Row, *, resume: bool = False) -> None:
        self.rows, self._path, self._identity = list(rows), path, identity
        self._adding = threading.Lock()
        self._locked = path.with_name(f".{path.stem}.lock").open("w")
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._earlier = read_rows(path)
            begun = self._earlier[-1].get("unfinished") if self._earlier else None
            for row in self._earlier:
                row.pop("unfinished", None)
            if resume and begun:
                self._resume(begun)
        except BaseException as error:
            self._locked.close()
            if isinstance(error, BlockingIOError):
                raise SystemExit(f"{path}: another process is running this table; wait for it to end") from error
            raise

    def _resume(self, begun: Row) -> None:
        """Take the file's last call for this one."""
        call = self._earlier[-1]["call"]
        different = [name for name, value in self._identity.items() if begun.get(name) != value]
        if different:
            raise SystemExit(
                f"{self._path}: the call of {call} had other {', '.join(different)}; "
                "give those again, or leave out resume=true to keep its runs as rows and begin anew"
            )
        found = {(row["arm"], spell(point_of(row))): row for row in self._earlier if row["call"] == call}
        self.rows = [found.get((row["arm"], spell(point_of(row))), {**row, "call": call}) for row in self.rows]
        self._earlier = [row for row in self._earlier if row["call"] != call]
        print(
            f"goes on with the call of {call}, {sum(row['repeats'] for row in self.rows)} runs of it done", flush=True
        )

    def add(self, index: int, report: Row) -> None:
        """Count a run's report in the row of this number; on the disk when this returns. Any thread may call it."""
        with self._adding:
            add_run(self.rows[index], report)
            self._write({"unfinished": self._identity})

    def _write(self, more: Row) -> None:
        _write(self._path, [*self._earlier, *({**row, **more} for row in self.rows if row["repeats"])])

    def end(self, *, finished: bool) -> list[Row]:
        """Release the file; the rows of all arms that ran. A call that is not ``finished`` can be resumed."""
        if finished:
            self._write({})
        self._locked.close()
        return [row for row in self.rows if row["repeats"]]


def error_report(status: int, output: str) -> Row:
    """What a failed run has in place of a report: ``error``, and ``error_kind`` of it.

    The kinds are ``out of memory``, ``refused`` (train.py's one line about a config, or about what is not installed
    or not there) and ``failed``.
    """
    kind = "out of memory" if ran_out_of_memory(status, output) else "refused" if status == 2 else "failed"
    return {"error": f"exit status {status}: {output.strip()[-_OUTPUT_KEPT:]}", "error_kind": kind}


def describe_error(error: str, error_kind: str = "failed") -> str:
    """The kind of an error and the one line that says most: train.py's own, or else the last."""
    return error_kind if error_kind == "out of memory" else f"{error_kind}: {own_line(error) or 'no output'}"


def describe_errors(row: Row) -> str:
    """The failed runs of a row for a table's cell; empty when there are none."""
    errors = row["errors"]
    if not errors:
        return ""
    kinds = row.get("error_kinds") or ["failed"] * len(errors)  # rows from before kinds were kept
    kind, count = Counter(kinds).most_common(1)[0]
    said = describe_error(errors[kinds.index(kind)], kind).replace("|", "/")
    said = said if len(said) <= _CELL else said[:_CELL].rsplit(" ", 1)[0] + " …"
    return said if len(errors) == row["repeats"] == count else f"{len(errors)} of {row['repeats']} runs {said}"


def median_step(row: Row) -> float:
    """The median step of a row's runs, seconds.

    Raises:
        statistics.StatisticsError: None of them came to a step.
    """
    return statistics.median(p50 for _, p50, _ in filter(None, row["step_seconds_p10_p50_p90"]))


def point_of(row: Row) -> Row:
    """A row's place in the matrix of its table: config keys, which have a dot but for ``seed``."""
    return {key: value for key, value in row.items() if "." in key or key == "seed"}


def spell(point: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())
