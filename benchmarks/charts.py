"""Charts of the rows of one call, for the documentation.

- ``waterfall``: samples/s of a cumulative table's configurations, each bar showing what its technique adds.
- ``losses``: overlaid loss curves of two to four configurations, from a table with ``losses: true``.
- ``bars``: samples/s of some configurations with their spread, at every point of the matrix.
- ``time_to_accuracy``: seconds from the start of a process to an accuracy, over all seeds; the first configuration is
  the reference of :func:`~benchmarks.tables.reached_by`.

Charts have no background, and inks that can be read on a light and on a dark page.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.rows import Row, describe_errors, point_of
from benchmarks.tables import PEERS, committed, reached_by
from composer_speedups.core.files import write_atomically
from composer_speedups.train.plot import CHART_STYLE, INK

_BLUE, _RED, _GREY = "#2b7bba", "#c44e52", "#909090"
_LINES = ((_RED, "-"), (_BLUE, "--"), ("#3a923a", ":"), ("#8c564b", "-."))
_DIGEST = "Rows"  # key of the PNG's text that identifies the rows it shows
_MEASURES = {
    "waterfall": "samples_per_sec",
    "losses": "losses",
    "bars": "samples_per_sec",
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


def configuration_bars(rows: Sequence[Row]) -> Figure:
    """Each configuration's median with its minimum and maximum, or why it has none, in a panel for each point."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(_spell_point(row), []).append(row)
    heights = [0.5 + 0.36 * len(panel) for panel in panels.values()]
    figure = _figure(0.7 + sum(heights))
    subplots = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    timed = [row for row in rows if row["samples_per_sec"]]
    for axes, (point, panel) in zip(subplots, panels.items(), strict=True):
        _bars(axes, panel, rows[0]["configuration"])
        _style_bars(axes, panel, max(row["samples_per_sec"]["max"] for row in timed))
        axes.set_title(point, loc="left")
    subplots[-1].set_xlabel(f"samples/s, steady state\n{_source(timed[0])}")
    return figure


def _bars(axes: Axes, rows: Sequence[Row], first: str) -> None:
    rates = {row["configuration"]: row["samples_per_sec"] for row in rows}
    base = rates.get(first)
    for place, row in enumerate(rows):
        rate = row["samples_per_sec"]
        if rate is None:
            _label(axes, describe_errors(row).partition(":")[0] or "not measured", 0, place, color=_RED)
            continue
        text = f"{rate['median']:,.0f}"
        if base is not None and row["configuration"] != first:
            text += f"  ×{rate['median'] / base['median']:.2f}"
        grey = row["configuration"] == first or row.get("peer") in PEERS
        _bar(axes, place, text, rate["median"], rate["min"], rate["max"], grey=grey)


def _bar(axes: Axes, place: int, text: str, median: float, least: float, most: float, *, grey: bool) -> None:
    axes.barh(place, median, color=_GREY if grey else _BLUE, height=0.62)
    if least < most:
        spread = [[median - least], [most - median]]
        axes.errorbar(median, place, xerr=spread, color=INK, capsize=3, linewidth=1.0)
    _label(axes, text, most, place)


def accuracy_bars(rows: Sequence[Row]) -> Figure:
    """Each configuration's time to the accuracy of the first one, or how many of its runs reached it."""
    peers = {row["configuration"]: row.get("peer") in PEERS for row in rows}
    names = list(peers)
    reached = reached_by(rows, names[0])
    figure = _figure(1.1 + 0.36 * len(names))
    axes = figure.add_subplot()
    base, longest = reached.median(names[0]), 0.0
    for place, name in enumerate(names):
        times, median = reached.times(name), reached.median(name)
        if median is None:
            _label(axes, f"{len(times)} of {len(reached.seconds[name])} runs reached it", 0, place, color=_RED)
            continue
        ratio = f"  ×{base / median:.2f}" if place and base is not None else ""
        _bar(axes, place, f"{median:.1f}{ratio}", median, times[0], times[-1], grey=not place or peers[name])
        longest = max(longest, times[-1])
    to_target = f"seconds from the start of the process to an accuracy of {reached.target:.4f} (shorter is better)"
    axes.set_xlabel(f"{to_target}\n{_source(rows[0])}")
    _style_bars(axes, [{"configuration": name} for name in names], longest)
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
    """What was measured and on which machine, for the line under a chart."""
    environment = row["environment"]
    return ", ".join(filter(None, [point, environment["gpu"] or "CPU", f"torch {environment['torch']}"]))


def _digest_of(rows: Sequence[Row], measure: str) -> str:
    """A digest of configurations, points and the values of a measurement."""
    values = [[row["configuration"], point_of(row), row.get(measure), row.get("error_kinds")] for row in rows]
    return hashlib.sha256(json.dumps([measure, values], sort_keys=True).encode()).hexdigest()


def call_shown(kind: str, rows: Sequence[Row], configurations: Sequence[str] = ()) -> list[Row]:
    """The rows that a chart shows: those of the last call that measured all configurations (by default: any), in order.

    Bars are of the call in which the first configuration, which the others are compared with, was fastest. A waterfall
    and losses show the first point of the matrix; the others show every point, and failed configurations.

    Raises:
        SystemExit: No call has them.
    """
    measure = _MEASURES[kind]
    named = [row for row in rows if not configurations or row["configuration"] in configurations]
    measured = [row for row in named if row.get(measure)]
    names: dict[str, set[str]] = {}
    for row in measured:
        names.setdefault(row["call"], set()).add(row["configuration"])
    calls = sorted(call for call in names if set(configurations) <= names[call])
    if not calls:
        raise SystemExit(f"no call has rows of {', '.join(configurations) or 'any configuration'} with {measure}")
    if kind == "bars":
        first = [row for row in measured if row["configuration"] == configurations[0] and row["call"] in calls]
        call = max(first, key=lambda row: row[measure]["median"])["call"]
    else:
        call = calls[-1]
    if kind in ("waterfall", "losses"):
        of_call = [row for row in measured if row["call"] == call]
        return [row for row in of_call if point_of(row) == point_of(of_call[0])]
    shown = [row for row in named if row["call"] == call]
    points = [point_of(row) for row in shown]
    order = [*configurations, *(row["configuration"] for row in shown)]
    return sorted(shown, key=lambda row: (points.index(point_of(row)), order.index(row["configuration"])))


def draw(kind: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG that contains :func:`_digest_of` its rows."""
    draws = {"waterfall": waterfall, "losses": loss_curves, "bars": configuration_bars}
    image = io.BytesIO()
    with rc_context(CHART_STYLE):
        figure = draws.get(kind, accuracy_bars)(rows)
        figure.savefig(image, format="png", metadata={_DIGEST: _digest_of(rows, _MEASURES[kind])})
    write_atomically(path, image.getvalue())


class Chart(NamedTuple):
    """A chart requested by a comment in a document."""

    kind: str
    table: str
    path: Path
    configurations: list[str]

    @classmethod
    def of(cls, words: Sequence[str]) -> Chart:
        """Parse ``KIND TABLE FILE.png [CONFIGURATION | CONFIGURATION …]``."""
        kind, table, path, *names = words
        return cls(kind, table, Path(path), [name.strip() for name in " ".join(names).split("|") if name.strip()])

    def rows(self) -> list[Row]:
        """The committed rows that it shows."""
        return call_shown(self.kind, committed(self.table), self.configurations)

    def is_stale(self) -> bool:
        """Whether the committed rows differ from those that the file shows."""
        if not self.path.is_file():
            return True
        with Image.open(self.path) as image:
            return image.info.get(_DIGEST) != _digest_of(self.rows(), _MEASURES[self.kind])

    def draw(self) -> None:
        draw(self.kind, self.rows(), self.path)
