"""Rows of one call as Markdown: the table that the runner prints, and the page that it leaves beside the rows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.failures import spelled
from benchmarks.figures import committed, where_of
from benchmarks.rows import Row, median_step, point_of, spell

__all__ = ["last_calls", "markdown", "page"]

_COLUMNS = ("arm", "point", "samples/s (least–most)", "ratio", "tokens/s", "MFU", "peak GiB", "warm-up s")
_MORE = {  # column → what of a row it shows, and how; "run" leaves the imports out
    "run s": ("run_seconds", ".1f"),
    "process s": ("process_seconds", ".1f"),
    "accuracy": ("accuracy", ".4f"),
    "published": ("published", ""),
}


def last_calls(table: str, count: int = 1) -> list[str]:
    """The rows of a table's last committed calls, one table each: failed ones too, without what random weights say.

    Ratios hold within a call, so that arms of two calls stay apart.
    """
    rows = committed(table)
    lines: list[str] = []
    for call in sorted({row["call"] for row in rows})[-count:]:
        one = [row for row in rows if row["call"] == call]
        lines += [*markdown(one, without=("tokens/s", "MFU", "accuracy")), ""]
        lines += [where_of([row for row in one if row["environment"]]), ""]
    return lines[:-1]


def markdown(rows: Sequence[Row], without: Sequence[str] = ()) -> Iterator[str]:
    """The rows as a Markdown table, speed-up over the first arm of each point.

    Arms with several ranks have an efficiency: their speed-up over the arm of one rank with the same name after a comma
    ("1 GPU, 128 each" for "2 GPUs, 128 each"), over their number.
    Seconds of whole runs and processes, accuracy and published figures have columns where rows have them.
    """
    more = [column for column, (name, _) in _MORE.items() if any(row.get(name) is not None for row in rows)]
    if any(row["ranks"] > 1 for row in rows):
        more = ["median step, ms", "efficiency", *more]
    columns = [column for column in (*_COLUMNS, *more) if column not in without]
    if not any(map(point_of, rows)):
        columns.remove("point")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    first: dict[str, float] = {}  # rate of the table's first arm, by point
    for row in rows:
        point = spell(point_of(row))
        if row["arm"] == rows[0]["arm"] and row["samples_per_sec"]:
            first[point] = row["samples_per_sec"]["median"]
        cells = {"arm": row["arm"], "point": point, **_measured(row, first.get(point)), **_more(row)}
        cells |= {"efficiency": _efficiency(row, rows), "median step, ms": _median_step(row)}
        yield f"| {' | '.join(cells.get(column, '') for column in columns)} |"


def _measured(row: Row, base: float | None) -> dict[str, str]:
    rate, failed = row["samples_per_sec"], spelled(row)
    if rate is None:
        return {_COLUMNS[2]: failed or ("not timed" if row["accuracy"] else "failed")}
    text = _rate(rate["median"])
    if len(rate["runs"]) > 1:
        text += f" ({_rate(rate['min'])}–{_rate(rate['max'])})"
    return {
        _COLUMNS[2]: f"{text}; {failed}" if failed else text,
        "ratio": "–" if base is None else f"{rate['median'] / base:.2f}",
        "tokens/s": _number(row.get("tokens_per_sec"), ",.0f"),
        "MFU": _number(row.get("mfu"), ".1%"),
        "peak GiB": _number(row["peak_memory_gib"], ".1f"),
        "warm-up s": _number(row["warmup_seconds"], ".1f"),
    }


def _efficiency(row: Row, rows: Sequence[Row]) -> str:
    same = [other for other in rows if other["ranks"] == 1 and _after_comma(other) == _after_comma(row)]
    if row["ranks"] == 1 or not row["samples_per_sec"] or not (same and same[0]["samples_per_sec"]):
        return ""
    return f"{row['samples_per_sec']['median'] / same[0]['samples_per_sec']['median'] / row['ranks']:.1%}"


def _median_step(row: Row) -> str:
    came_to_a_step = any(row.get("step_seconds_p10_p50_p90") or [])
    return f"{1e3 * median_step(row):.1f}" if came_to_a_step else ""


def _after_comma(row: Row) -> str:
    return str(row["arm"]).partition(", ")[2]


def _more(row: Row) -> dict[str, str]:
    return {column: _number(row.get(name), form) for column, (name, form) in _MORE.items()}


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _number(value: dict[str, Any] | str | None, form: str) -> str:
    """The median of a measurement; a text as it is."""
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value["median"], form)


def page(rows: Sequence[Row], name: str, given: Sequence[str], published: str = "", chart: str = "") -> str:
    """A Markdown page of a call: the table, where it ran, and its chart.

    Args:
        rows: All of one call.
        name: The table's.
        given: What the command line changed in it.
        published: Where the published figures are from.
        chart: File name of the chart; empty for none.
    """
    command = shlex.join(["python", "-m", "benchmarks.run", name, *given])
    lines = [f"# {name}", "", f"`{command}`, call of {rows[0]['call']}.", "", *markdown(rows), ""]
    known = [row for row in rows if row["environment"]]
    lines += [where_of(known) if known else "No run ended without an error, so none says where it ran."]
    runs = sorted({row["repeats"] for row in rows})
    lines += ["", f"Runs an arm: {', '.join(map(str, runs))}; medians, with the least and the greatest."]
    if published:
        lines += ["", f"Published: {published}."]
    if chart:
        lines += ["", f"![{name}]({chart})"]
    return "\n".join(lines) + "\n"
