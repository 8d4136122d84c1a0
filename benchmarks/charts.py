"""Charts of rows, for the documentation.

- ``waterfall``: samples/s of a cumulative table's configurations, each bar showing what its technique adds.
- ``losses``: overlaid loss curves of two to four configurations, from a table with ``losses: true``.
- ``beside``: samples/s of the fast set and the fastest configuration of each peer, a panel for each selection of rows.
- ``time_to_accuracy``: seconds from the start of a process to the accuracy of :func:`~benchmarks.tables.reached_by`,
  over all seeds, with start-up in a faint colour.

A waterfall and losses show the first point of the matrix. Ratios of the last two are to the fastest peer.

Charts have no background, and inks that can be read on a light and on a dark page.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.rows import Row, newest, point_of
from benchmarks.tables import Beside, committed, gpu_of, is_peer, measured_beside, reached_by
from composer_speedups.core.files import write_atomically
from composer_speedups.train.plot import CHART_STYLE, INK

_BLUE, _RED, _GREY = "#2b7bba", "#c44e52", "#909090"
_LINES = ((_RED, "-"), (_BLUE, "--"), ("#3a923a", ":"), ("#8c564b", "-."))
_DIGEST = "Rows"  # key of the PNG's text that identifies the rows it shows
_MEASURES = {
    "waterfall": "samples_per_sec",
    "losses": "losses",
    "beside": "samples_per_sec",
    "time_to_accuracy": "evaluations",
}


def waterfall(rows: Sequence[Row]) -> Figure:
    """Samples/s of a cumulative table's configurations at one point; each bar starts at the previous one's value."""
    rates = [row["samples_per_sec"]["median"] for row in rows]
    figure = _figure(1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for place, rate in enumerate(rates):
        before = rates[place - 1] if place else 0.0
        colour = _GREY if place == 0 else _BLUE if rate >= before else _RED
        axes.barh(place, rate - before, left=before, color=colour, height=0.62)
        change = "" if place == 0 else f"  ×{rate / before:.2f}"
        _label(axes, f"{rate:,.0f}{change}", max(rate, before), place)
    axes.set_xlabel(f"samples/s, steady state\n{_source(rows[0], _spell_point(rows[0]))}")
    axes.set_title(f"{rates[-1] / rates[0]:.1f} times {rows[0]['configuration']}, one technique at a time")
    _style_bars(axes, rows, max(rates))
    return figure


def loss_curves(rows: Sequence[Row], window: int = 20) -> Figure:
    """The ``losses`` of each row: every batch in a light colour, and the mean of the last ``window`` batches."""
    figure = _figure(4.2)
    axes = figure.add_subplot()
    for row, (colour, style) in zip(rows, itertools.cycle(_LINES), strict=False):
        batches = np.arange(1, len(row["losses"]) + 1)
        axes.plot(batches, row["losses"], color=colour, alpha=0.18, linewidth=0.8)
        smoothed = smooth(row["losses"], window)
        axes.plot(batches, smoothed, style, color=colour, linewidth=2.0, label=row["configuration"])
    axes.set_xlabel(f"batch\n{_source(rows[0], _spell_point(rows[0]))}")
    axes.set_ylabel("training loss")
    axes.set_title(f"each batch (faint) and the mean of the last {window}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _style(axes)
    return figure


def smooth(losses: Sequence[float], window: int) -> np.ndarray:
    """The mean over the last ``window`` batches, or fewer at the start; has the length of ``losses``."""
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def beside_bars(points: Sequence[Beside]) -> Figure:
    """The median rates of peers and of the fast set with their minimum and maximum, in a panel for each point."""
    shown = [[row for row in point.rows if row.get("peer") != "own_trainer"] for point in points]
    heights = [0.5 + 0.36 * len(rows) for rows in shown]
    figure = _figure(0.8 + sum(heights))
    subplots = figure.subplots(len(points), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, point, rows in zip(subplots, points, shown, strict=True):
        for place, row in enumerate(rows):
            rate = row["samples_per_sec"]
            text = f"{rate['median']:,.0f}  ×{point.ratio(row):.2f}"
            _bar(axes, place, text, rate["median"], rate["min"], rate["max"], grey=is_peer(row))
        _style_bars(axes, rows, max(row["samples_per_sec"]["max"] for row in rows))
        axes.set_title(f"{point.model}, batches of {point.batch} tokens, {gpu_of(point.base)}", loc="left")
    compared = "samples/s, steady state\n×: compared with the fastest other program, in bf16 unless it has fp8"
    days = ", ".join(sorted({point.base["call"][:10] for point in points}))
    subplots[-1].set_xlabel(f"{compared}\ntorch {points[0].base['environment']['torch']}, {days}")
    return figure


def _bar(
    axes: Axes, place: int, text: str, median: float, least: float, most: float, *, grey: bool, start: float = 0.0
) -> None:
    """A bar, its first part up to ``start`` in a faint colour, with its spread and a label."""
    colour = _GREY if grey else _BLUE
    if start:
        axes.barh(place, start, color=colour, alpha=0.45, height=0.62)
    axes.barh(place, median - start, left=start, color=colour, height=0.62)
    if least < most:
        spread = [[median - least], [most - median]]
        axes.errorbar(median, place, xerr=spread, color=INK, capsize=3, linewidth=1.0)
    _label(axes, text, most, place)


def accuracy_bars(rows: Sequence[Row]) -> Figure:
    """Each configuration's time until its last evaluation, with that evaluation's mean accuracy."""
    reached = reached_by(rows)
    peers = {row["configuration"]: is_peer(row) for row in rows}
    figure = _figure(1.1 + 0.36 * len(peers))
    axes = figure.add_subplot()
    longest = 0.0
    for place, (name, peer) in enumerate(peers.items()):
        end, ratio, start = reached.end(name), reached.ratio_of_ends(name), reached.starts[name]
        accuracy = statistics.fmean(reached.finals[name])
        text = f"{end:.1f} s" + (f"  ×{ratio:.2f}" if ratio else "") + f"  accuracy {accuracy:.4f}"
        _bar(axes, place, text, end, reached.ends[name][0], reached.ends[name][-1], grey=peer, start=start)
        longest = max(longest, reached.ends[name][-1])
    described = "seconds from the start of the process to the last evaluation (shorter is better)"
    compared = "faint: start-up; ×: compared with the fastest other program"
    axes.set_xlabel(f"{described}\n{compared}\n{_source(rows[0])}")
    _style_bars(axes, [{"configuration": name} for name in peers], 1.25 * longest)
    return figure


def _figure(height: float) -> Figure:
    return Figure(figsize=(8.0, height), dpi=150, layout="constrained")  # README shows it about 800 pixels wide


def _label(axes: Axes, text: str, x: float, y: float, **style: Any) -> None:
    """Write just to the right of a point."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", **style)


def _style(axes: Axes, **grid: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, **grid)
    axes.set_axisbelow(True)


def _style_bars(axes: Axes, rows: Sequence[Row], longest: float) -> None:
    """Name the configurations from top to bottom, and leave room for the labels of bars."""
    axes.set_yticks(range(len(rows)), [row["configuration"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)  # not around the bars alone: a configuration may have none
    axes.set_xlim(0, 1.28 * longest)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _style(axes, axis="x")


def _spell_point(row: Row) -> str:
    """Format a row's point in the matrix: ``batch size 128, seed 1``."""
    point = point_of(row).items()
    return ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in point)


def _source(row: Row, point: str = "") -> str:
    """What was measured, on which machine and when, for the line under a chart."""
    environment, day = row["environment"], row["call"][:10]
    return ", ".join(filter(None, [point, environment["gpu"] or "CPU", f"torch {environment['torch']}", day]))


def _digest_of(rows: Sequence[Row], measure: str) -> str:
    """A digest of configurations, points and the values of a measurement."""
    values = [[row["configuration"], point_of(row), row.get(measure), row.get("error_kinds")] for row in rows]
    return hashlib.sha256(json.dumps([measure, values], sort_keys=True).encode()).hexdigest()


def call_shown(measure: str, rows: Sequence[Row], configurations: Sequence[str] = ()) -> list[Row]:
    """The rows, in their order, of the last call that measured all configurations (by default: any).

    Raises:
        SystemExit: No call has them.
    """
    measured = [row for row in rows if row.get(measure)]
    named = [row for row in measured if not configurations or row["configuration"] in configurations]
    names: dict[str, set[str]] = {}
    for row in named:
        names.setdefault(row["call"], set()).add(row["configuration"])
    calls = [call for call in names if set(configurations) <= names[call]]
    if not calls:
        raise SystemExit(f"no call has rows of {', '.join(configurations) or 'any configuration'} with {measure}")
    return [row for row in named if row["call"] == max(calls)]


class Chart(NamedTuple):
    """A chart requested by a comment in a document."""

    kind: str
    path: Path
    arguments: list[str]  # a table and configurations, or selections of rows

    @classmethod
    def of(cls, request: str) -> Chart:
        """Parse ``KIND FILE.png | TABLE [KEY=VALUE …] [| …]``."""
        (kind, path), *arguments = (part.split() for part in request.split(" | "))
        return cls(kind, Path(path), [" ".join(words) for words in arguments])

    def shown(self) -> tuple[list[Row], Figure]:
        """The committed rows that it shows, and the figure."""
        if self.kind == "beside":
            points = [measured_beside(selection)[0] for selection in self.arguments]
            return [row for point in points for row in point.rows], beside_bars(points)
        table, *configurations = self.arguments
        rows = call_shown(_MEASURES[self.kind], newest(committed(table)), configurations)
        if self.kind == "time_to_accuracy":
            return rows, accuracy_bars(rows)
        rows = [row for row in rows if point_of(row) == point_of(rows[0])]
        return rows, (waterfall if self.kind == "waterfall" else loss_curves)(rows)

    def is_stale(self) -> bool:
        """Whether the committed rows differ from those that the file shows."""
        if not self.path.is_file():
            return True
        with rc_context(CHART_STYLE), Image.open(self.path) as image:
            return image.info.get(_DIGEST) != _digest_of(self.shown()[0], _MEASURES[self.kind])

    def draw(self) -> None:
        """Write a PNG that contains :func:`_digest_of` its rows."""
        image = io.BytesIO()
        with rc_context(CHART_STYLE):
            rows, figure = self.shown()
            figure.savefig(image, format="png", metadata={_DIGEST: _digest_of(rows, _MEASURES[self.kind])})
        write_atomically(self.path, image.getvalue())
