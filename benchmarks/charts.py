"""python -m benchmarks.charts KIND TABLE FILE.png [ARM | ARM …]: charts from the committed rows of one call.

- ``waterfall``: samples/s of a cumulative table's arms, each bar what its technique added.
- ``losses``: loss curves of two or more arms over each other, from a table with ``losses: true``.

The rows are those of the last call of benchmarks/results/nvidia-h200/TABLE.jsonl that has the arms; the first point of
its matrix is drawn. Without arms, all of the call's are taken.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rows import RESULTS, Row
from composer_speedups.files import write_atomically

__all__ = ["last_call", "loss_curves", "main", "smooth", "waterfall"]

_WIDTH = 8.0  # inches, at 150 dots an inch; README shows it at some 800 pixels
_GAIN, _LOSS, _TOTAL = "#2b7bba", "#c44e52", "#555555"
_COLOURS = ("#c44e52", "#2b7bba", "#3a923a", "#8c564b")


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
            if row["call"] == call and _point(row) == _point(next(r for r in usable if r["call"] == call)):
                found[row["arm"]] = row
        if set(arms) <= set(found):
            return [found[arm] for arm in arms or found]
    raise SystemExit(f"no call has rows of {', '.join(arms) or 'any arm'} with {needs}")


def _point(row: Row) -> dict[str, object]:
    return {key: value for key, value in row.items() if "." in key}


def _spell(row: Row) -> str:
    """What was measured, for the line under a chart."""
    point = ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in _point(row).items())
    return ", ".join(filter(None, [point, row["environment"]["gpu"] or "CPU", f"torch {row['environment']['torch']}"]))


def waterfall(rows: Sequence[Row], path: Path) -> None:
    """Draw samples/s from the first row to the last, each bar from the value before it to its own.

    Args:
        rows: The arms of a cumulative table in their order, of one call and point.
        path: PNG to write.
    """
    rates = [row["samples_per_sec"]["median"] for row in rows]
    figure = Figure(figsize=(_WIDTH, 1.3 + 0.42 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for place, rate in enumerate(rates):
        before = rates[place - 1] if place else 0.0
        colour = _TOTAL if place == 0 else _GAIN if rate >= before else _LOSS
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
    axes.set_xlabel(f"samples/s, steady state\n{_spell(rows[0])}", fontsize=10)
    axes.set_title(f"{rates[-1] / rates[0]:.1f} times {rows[0]['arm']}, one technique at a time", fontsize=12)
    _plain(axes)
    axes.grid(visible=False, axis="y")
    _write(figure, path)


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
    if len(rows) > len(_COLOURS):
        raise ValueError(f"{len(rows)} curves in one chart; name {len(_COLOURS)} arms at most")
    figure = Figure(figsize=(_WIDTH, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, colour, style in zip(rows, _COLOURS, ("-", "--", ":", "-."), strict=False):
        batches = np.arange(1, len(row["losses"]) + 1)
        axes.plot(batches, row["losses"], color=colour, alpha=0.18, linewidth=0.8)
        axes.plot(batches, smooth(row["losses"], window), style, color=colour, linewidth=2.0, label=row["arm"])
    axes.set_xlabel(f"batch\n{_spell(rows[0])}", fontsize=10)
    axes.set_ylabel("training loss", fontsize=11)
    axes.set_title(f"each batch (faint) and the mean of the last {window}", fontsize=12)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(fontsize=11, frameon=False)
    _plain(axes)
    _write(figure, path)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _write(figure: Figure, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def main(arguments: Sequence[str], results: Path = RESULTS / "nvidia-h200") -> None:
    if len(arguments) < 3 or arguments[0] not in ("waterfall", "losses"):
        print(__doc__)
        raise SystemExit(2)
    kind, table, path, *names = arguments
    arms = [name.strip() for name in " ".join(names).split("|") if name.strip()]
    source = results / f"{table}.jsonl"
    if not source.is_file():
        raise SystemExit(f"{source}: no such rows; measure them with python -m benchmarks.run {table}")
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    if kind == "waterfall":
        waterfall(last_call(rows, "samples_per_sec", arms), Path(path))
    else:
        try:
            loss_curves(last_call(rows, "losses", arms), Path(path))
        except ValueError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
