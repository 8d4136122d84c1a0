"""Rows of one call as Markdown: the table that the runner prints, and the page that it leaves beside the rows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.failures import spelled
from benchmarks.figures import where_of
from benchmarks.rows import Row, point_of, spell

__all__ = ["markdown", "page"]

_COLUMNS = ("arm", "point", "samples/s (least–most)", "ratio", "tokens/s", "MFU", "peak GiB", "warm-up s")
_MORE = {  # column → what of a row it shows; "run" leaves the imports out
    "run s": "run_seconds",
    "process s": "process_seconds",
    "accuracy": "accuracy",
    "published": "published",
}


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as a Markdown table, speed-up over the first arm of each point.

    Seconds of whole runs and processes, accuracy and published figures have columns where rows have them.
    """
    more = [column for column, name in _MORE.items() if any(row.get(name) is not None for row in rows)]
    columns = [*_COLUMNS, *more]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    first: dict[str, float] = {}  # rate of the table's first arm, by point
    for row in rows:
        point = spell(point_of(row))
        if row["arm"] == rows[0]["arm"] and row["samples_per_sec"]:
            first[point] = row["samples_per_sec"]["median"]
        cells = {"arm": row["arm"], "point": point, **_measured(row, first.get(point)), **_more(row)}
        yield f"| {' | '.join(cells.get(column, '') for column in columns)} |"


def _measured(row: Row, base: float | None) -> dict[str, str]:
    rate, failed = row["samples_per_sec"], spelled(row)
    if rate is None:
        return {_COLUMNS[2]: failed or ("not timed" if row["accuracy"] else "failed")}
    text = f"{rate['median']:,.0f} ({rate['min']:,.0f}–{rate['max']:,.0f})"
    return {
        _COLUMNS[2]: f"{text}; {failed}" if failed else text,
        "ratio": "–" if base is None else f"{rate['median'] / base:.2f}",
        "tokens/s": _number(row.get("tokens_per_sec"), ",.0f"),
        "MFU": _number(row.get("mfu"), ".1%"),
        "peak GiB": _number(row["peak_memory_gib"], ".1f"),
        "warm-up s": _number(row["warmup_seconds"], ".1f"),
    }


def _more(row: Row) -> dict[str, str]:
    return {
        "run s": _number(row.get("run_seconds"), ".1f"),
        "process s": _number(row.get("process_seconds"), ".1f"),
        "accuracy": _number(row["accuracy"], ".4f"),
        "published": row.get("published") or "",
    }


def _number(spread: dict[str, Any] | None, form: str) -> str:
    return "" if spread is None else format(spread["median"], form)


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
