"""python -m benchmarks.charts KIND TABLE FILE.png [ARM | ARM …]: charts from the committed rows of one call.

- ``waterfall``: samples/s of a cumulative table's arms, each bar what its technique added.
- ``losses``: loss curves of two or more arms over each other, from a table with ``losses: true``.
- ``bars``: samples/s of arms side by side, with their spread, at every point of the matrix.
- ``seconds``: the same of whole processes' seconds, from a table with ``fresh: true``.
- ``seeds``: accuracy by arm and seed, from a table whose matrix is over ``seed``.

The rows are those of the last call of benchmarks/results/nvidia-h200/TABLE.jsonl that has the arms; ``waterfall`` and
``losses`` draw the first point of its matrix. Without arms, all of the call's are taken. The runner draws each table in
the kind that suits it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.bars import arm_bars, seed_dots
from benchmarks.canvas import (
    BLUE,
    COLOURS,
    GREY,
    RED,
    WIDTH,
    digest_in,
    digest_of,
    plain,
    source,
    spell_point,
    write_png,
)
from benchmarks.figures import RESULTS, committed
from benchmarks.rows import Row, point_of

__all__ = ["Chart", "draw_table", "last_call", "loss_curves", "main", "smooth", "waterfall"]

_NEEDS = {
    "waterfall": "samples_per_sec",
    "losses": "losses",
    "bars": "samples_per_sec",
    "seconds": "process_seconds",
    "seeds": "accuracy",
}  # what a row must hold


def last_call(rows: Sequence[Row], needs: str, arms: Sequence[str] = ()) -> list[Row]:
    """The rows of the last call that has the arms, at its first point of the matrix, in the order of the arms.

    Args:
        rows: Of one table, as committed.
        needs: What a row must hold: ``samples_per_sec``, ``losses``.
        arms: Their names; none takes every arm.

    Raises:
        SystemExit: No call has them.
    """
    usable = [row for row in rows if row.get(needs) and (not arms or row["arm"] in arms)]
    for call in sorted({row["call"] for row in usable}, reverse=True):
        found: dict[str, Row] = {}
        for row in usable:
            if row["call"] == call and point_of(row) == point_of(next(r for r in usable if r["call"] == call)):
                found[row["arm"]] = row
        if set(arms) <= set(found):
            return [found[arm] for arm in arms or found]
    raise SystemExit(f"no call has rows of {', '.join(arms) or 'any arm'} with {needs}")


def waterfall(rows: Sequence[Row], path: Path) -> None:
    """Draw samples/s from the first row to the last, each bar from the value before it to its own.

    Args:
        rows: The arms of a cumulative table in their order, of one call and point.
        path: PNG to write.
    """
    rates = [row["samples_per_sec"]["median"] for row in rows]
    figure = Figure(figsize=(WIDTH, 1.3 + 0.42 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for place, rate in enumerate(rates):
        before = rates[place - 1] if place else 0.0
        colour = GREY if place == 0 else BLUE if rate >= before else RED
        axes.barh(place, rate - before, left=before, color=colour, height=0.62)
        if place:  # from the bar above
            axes.plot([before, before], [place - 0.69, place + 0.31], color="#999999", linewidth=0.8)
        change = "" if place == 0 else f"  ×{rate / before:.2f}"
        axes.annotate(
            f"{rate:,.0f}{change}",
            (max(rate, before), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=11,
        )
    axes.set_yticks(range(len(rows)), [row["arm"] for row in rows], fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(rates))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"samples/s, steady state\n{source(rows[0], spell_point(rows[0]))}", fontsize=10)
    axes.set_title(f"{rates[-1] / rates[0]:.1f} times {rows[0]['arm']}, one technique at a time", fontsize=12)
    plain(axes)
    axes.grid(visible=False, axis="y")
    write_png(figure, path, digest_of(rows, "samples_per_sec"))


def smooth(losses: Sequence[float], window: int) -> np.ndarray:
    """Mean over the last ``window`` batches, fewer at the start; as long as ``losses``."""
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_curves(rows: Sequence[Row], path: Path, window: int = 20) -> None:
    """Draw the training loss of each row: every batch faintly, and the mean of the last ``window`` over it.

    Args:
        rows: With ``losses``, four at most; their arms name the curves.
        path: PNG to write.
        window: Batches of the mean.

    Raises:
        ValueError: More rows than can be told apart.
    """
    if len(rows) > len(COLOURS):
        raise ValueError(f"{len(rows)} curves in one chart; name {len(COLOURS)} arms at most")
    figure = Figure(figsize=(WIDTH, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, colour, style in zip(rows, COLOURS, ("-", "--", ":", "-."), strict=False):
        batches = np.arange(1, len(row["losses"]) + 1)
        axes.plot(batches, row["losses"], color=colour, alpha=0.18, linewidth=0.8)
        axes.plot(batches, smooth(row["losses"], window), style, color=colour, linewidth=2.0, label=row["arm"])
    axes.set_xlabel(f"batch\n{source(rows[0], spell_point(rows[0]))}", fontsize=10)
    axes.set_ylabel("training loss", fontsize=11)
    axes.set_title(f"each batch (faint) and the mean of the last {window}", fontsize=12)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(fontsize=11, frameon=False)
    plain(axes)
    write_png(figure, path, digest_of(rows, "losses"))


def draw_table(table: Row, rows: Sequence[Row], path: Path) -> bool:
    """Draw a call's rows in the kind that suits the table; False where they have nothing to draw.

    Args:
        table: As read: ``losses``, ``cumulative``, ``fresh`` and the matrix decide.
        rows: Of one call.
        path: PNG to write.
    """
    kind = kind_of(table, rows)
    usable = [row for row in rows if row.get(_NEEDS[kind])]
    if not usable:
        return False
    if kind in ("waterfall", "losses"):
        usable = [row for row in usable if point_of(row) == point_of(usable[0])]
    _draw(kind, rows if kind in ("bars", "seconds") else usable, path)
    return True


def kind_of(table: Row, rows: Sequence[Row]) -> str:
    """The kind of chart for a table: see the top of this file."""
    if table.get("losses") and len({row["arm"] for row in rows}) <= len(COLOURS):  # more cannot be told apart
        return "losses"
    if "seed" in table.get("matrix", {}):
        return "seeds"
    if table.get("cumulative"):
        return "waterfall"
    return "seconds" if table.get("fresh") else "bars"


def _draw(kind: str, rows: Sequence[Row], path: Path) -> None:
    if kind == "waterfall":
        waterfall(rows, path)
    elif kind == "losses":
        loss_curves(rows, path)
    elif kind == "seeds":
        seed_dots(rows, path)
    else:
        arm_bars(rows, path, _NEEDS[kind])


def _whole_call(rows: Sequence[Row], needs: str, arms: Sequence[str]) -> list[Row]:
    """All rows of the last call that has the arms, failed ones too, at every point, in the order of the table."""
    call = last_call(rows, needs, arms)[0]["call"]
    return [row for row in rows if row["call"] == call and (not arms or row["arm"] in arms)]


class Chart(NamedTuple):
    """What the command line, or a comment in a document, asks for."""

    kind: str
    table: str
    path: Path
    arms: list[str]

    @classmethod
    def of(cls, words: Sequence[str]) -> Chart:
        """From ``KIND TABLE FILE.png [ARM | ARM …]``."""
        kind, table, path, *names = words
        return cls(kind, table, Path(path), [name.strip() for name in " ".join(names).split("|") if name.strip()])

    def rows(self, results: Path = RESULTS) -> list[Row]:
        """What it shows.

        Raises:
            SystemExit: There are no such rows.
        """
        source_file = results / f"{self.table}.jsonl"
        if not source_file.is_file():
            raise SystemExit(f"{source_file}: no such rows; measure them with python -m benchmarks.run {self.table}")
        rows = committed(self.table, results)
        pick = _whole_call if self.kind in ("bars", "seconds", "seeds") else last_call
        picked = pick(rows, _NEEDS[self.kind], self.arms)
        if self.kind == "seeds":
            picked = [row for row in picked if row.get("accuracy")]
            if any("seed" not in row for row in picked):
                raise SystemExit(f"{source_file}: its rows are of one seed; draw bars")
        return picked

    def is_stale(self) -> bool:
        """Whether the committed rows are others than the file shows."""
        return digest_in(self.path) != digest_of(self.rows(), _NEEDS[self.kind])

    def draw(self, results: Path = RESULTS) -> None:
        """Write the file.

        Raises:
            SystemExit: There are no such rows, or too many for one chart.
        """
        try:
            _draw(self.kind, self.rows(results), self.path)
        except ValueError as error:
            raise SystemExit(str(error)) from error


def main(arguments: Sequence[str], results: Path = RESULTS) -> None:
    if len(arguments) < 3 or arguments[0] not in _NEEDS:
        print(__doc__)
        raise SystemExit(2)
    Chart.of(arguments).draw(results)


if __name__ == "__main__":
    main(sys.argv[1:])
