"""One call of a table: what has run of it, kept run by run, and its rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.journal import Journal, Unfinished, code_version, header_of, read_unfinished
from benchmarks.printed import page
from benchmarks.rows import RESULTS, Row, call_time, folder_of, keep_rows, row_of
from benchmarks.table import Arm
from composer_speedups.core.commands import output_of
from composer_speedups.core.files import write_atomically

__all__ = ["Call", "leave_page", "present_gpu"]

ROOT = Path(__file__).parent.parent


class Call:
    """What has run of a call.

    Attributes:
        runs: Reports by number of the arm and repeat.
    """

    def __init__(self, unfinished: Unfinished, journal: Journal, results: Path) -> None:
        self._unfinished, self._journal, self._results = unfinished, journal, results
        self.runs = unfinished.runs

    @classmethod
    def begin(cls, table: Row, name: str, arms: Sequence[Arm], results: Path = RESULTS) -> Call:
        """Go on with the unfinished call where the table says ``resume`` and there is one, or begin a new one.

        Raises:
            SystemExit: Another process is running the table, or the unfinished call is of something else.
        """
        journal = Journal(folder_of(present_gpu(), results) / f"{name}.runs.jsonl")
        try:
            return cls(_take_up(journal, table, name, arms, results), journal, results)
        except BaseException:
            journal.close(finished=False)
            raise

    def add(self, arm: int, repeat: int, report: Row) -> None:
        """Keep a run's report; on the disk when this returns."""
        self._journal.add(arm, repeat, report)
        self.runs[arm, repeat] = report

    def end(self, *, finished: bool) -> list[Row]:
        """Keep and return the rows of all arms that ran; when the call is not ``finished``, it can be resumed."""
        rows = _rows_of(self._unfinished)
        if rows:
            keep_rows(rows, self._unfinished.header["table"], self._results)
        self._journal.close(finished=finished)
        if not finished:
            print(f"stopped; resume=true goes on from {self._journal.path}", file=sys.stderr, flush=True)
        return rows


def _take_up(journal: Journal, table: Row, name: str, arms: Sequence[Arm], results: Path) -> Unfinished:
    """The call that the working file is of, or a new one, for which the rows of an older one are kept first."""
    header = header_of(name, call_time(), table, arms, code_version(ROOT))
    if table.get("resume") and (found := journal.go_on(header)) is not None:
        print(f"goes on with the call of {found.header['call']}, {len(found.runs)} runs of it done", flush=True)
        return found
    if (left := read_unfinished(journal.path)) is not None:
        keep_rows(_rows_of(left), name, results)
    journal.begin(header)
    return Unfinished(header, {})


def _rows_of(call: Unfinished) -> list[Row]:
    header, published = call.header, call.header["published"]
    return [
        row_of(header["table"], header["call"], arm, reports, header["jobs"], published.get(arm.name))
        for index, arm in enumerate(call.arms)
        if (reports := call.reports_of(index))
    ]


def leave_page(
    table: Row,
    rows: Sequence[Row],
    name: str,
    draw: Callable[[Row, Sequence[Row], Path], bool],
    results: Path = RESULTS,
) -> list[Path]:
    """Write ``<name>.md`` and, where ``draw`` has something to draw, ``<name>.png`` beside the rows; returns them.

    Args:
        table: As read.
        rows: Of one finished call.
        name: The table's.
        draw: Draws the rows into a file; False where there is nothing to draw.
        results: Folder of all rows.
    """
    folder = folder_of(next((row["environment"]["gpu"] for row in rows if row["environment"]), None), results)
    chart, text = folder / f"{name}.png", folder / f"{name}.md"
    drawn = draw(table, rows, chart)
    where = table.get("published", {"where": ""})["where"]
    write_atomically(text, page(rows, name, table.get("given", []), where, chart.name if drawn else ""))
    return [text, chart] if drawn else [text]


def present_gpu() -> str | None:
    """The GPU's name, asked without torch, which would take memory on it; None without one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return None
    said = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", timeout=60)
    return (said or "").split("\n")[0] or None
