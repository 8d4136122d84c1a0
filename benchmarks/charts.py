"""python -m benchmarks.charts KIND TABLE FILE.png [CONFIGURATION | …]: charts from the committed rows of one call.

- ``waterfall``: samples/s of a cumulative table's configurations, each bar showing what its technique adds.
- ``losses``: overlaid loss curves of two or more configurations, from a table with ``losses: true``.
- ``bars``: samples/s of configurations with their spread, at every point of the matrix.
- ``seconds``: the same for the duration of whole processes, from a table with ``fresh: true``.
- ``seeds``: accuracy by configuration and seed, from a table whose matrix has ``seed``.

The rows are those of the last call in benchmarks/results/nvidia-h200/TABLE.jsonl that has the configurations; by
default all of the call's are drawn. ``waterfall`` and ``losses`` draw the first point of the matrix. The runner draws
each table in the kind that suits it.
"""

from __future__ import annotations

import hashlib
import io
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.rows import Row, describe_errors, point_of, read_rows
from benchmarks.tables import COMMITTED
from composer_speedups.core.files import write_atomically

_WIDTH = 8.0  # inches, at 150 dots per inch; README shows it about 800 pixels wide
_BLUE, _RED, _GREY = "#2b7bba", "#c44e52", "#555555"
_COLOURS = (_RED, _BLUE, "#3a923a", "#8c564b")
_DIGEST = "Rows"  # key of the PNG's text that identifies the rows it shows


def waterfall(rows: Sequence[Row], path: Path) -> None:
    """Draw samples/s of a cumulative table's configurations at one point; each bar starts at the previous one's
    value."""
    rates = [row["samples_per_sec"]["median"] for row in rows]
    figure = _figure(1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for place, rate in enumerate(rates):
        before = rates[place - 1] if place else 0.0
        colour = _GREY if place == 0 else _BLUE if rate >= before else _RED
        axes.barh(place, rate - before, left=before, color=colour, height=0.62)
        if place:  # from the bar above
            axes.plot([before, before], [place - 0.69, place + 0.31], color="#999999", linewidth=0.8)
        change = "" if place == 0 else f"  ×{rate / before:.2f}"
        _label(axes, f"{rate:,.0f}{change}", max(rate, before), place, fontsize=11)
    axes.set_yticks(range(len(rows)), [row["configuration"] for row in rows], fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(rates))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"samples/s, steady state\n{_source(rows[0], _spell_point(rows[0]))}", fontsize=10)
    axes.set_title(f"{rates[-1] / rates[0]:.1f} times {rows[0]['configuration']}, one technique at a time", fontsize=12)
    _plain(axes)
    axes.grid(visible=False, axis="y")
    _write(figure, path, _digest_of(rows, "samples_per_sec"))


def smooth(losses: Sequence[float], window: int) -> np.ndarray:
    """The mean over the last ``window`` batches, or fewer at the start; has the length of ``losses``."""
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_curves(rows: Sequence[Row], path: Path, window: int = 20) -> None:
    """Draw the ``losses`` of each row: every batch in a light colour, and the mean of the last ``window`` batches.

    Raises:
        ValueError: More than four rows, which could not be distinguished.
    """
    if len(rows) > len(_COLOURS):
        raise ValueError(f"{len(rows)} curves in one chart; name {len(_COLOURS)} configurations at most")
    figure = _figure(4.2)
    axes = figure.add_subplot()
    for row, colour, style in zip(rows, _COLOURS, ("-", "--", ":", "-."), strict=False):
        batches = np.arange(1, len(row["losses"]) + 1)
        axes.plot(batches, row["losses"], color=colour, alpha=0.18, linewidth=0.8)
        axes.plot(
            batches, smooth(row["losses"], window), style, color=colour, linewidth=2.0, label=row["configuration"]
        )
    axes.set_xlabel(f"batch\n{_source(rows[0], _spell_point(rows[0]))}", fontsize=10)
    axes.set_ylabel("training loss", fontsize=11)
    axes.set_title(f"each batch (faint) and the mean of the last {window}", fontsize=12)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(fontsize=11, frameon=False)
    _plain(axes)
    _write(figure, path, _digest_of(rows, "losses"))


def configuration_bars(rows: Sequence[Row], path: Path, measure: str = "samples_per_sec") -> None:
    """Draw each configuration's median as a bar with its minimum and maximum, with one panel per point of the matrix.

    A configuration without a value shows the reason instead. The first configuration is grey; the others are labelled
    with their ratio to it, or if ``measure`` is ``process_seconds``, with the first one's ratio to theirs.
    """
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(_spell_point(row), []).append(row)
    heights = [0.5 + 0.36 * len(panel) for panel in panels.values()]
    figure = _figure(0.7 + sum(heights))
    drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    known = [row for row in rows if row[measure]]
    for axes, (point, panel) in zip(drawn, panels.items(), strict=True):
        _panel(axes, panel, measure, rows[0]["configuration"])
        axes.set_xlim(0, 1.28 * max(row[measure]["max"] for row in known))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(point, fontsize=11, loc="left")
    unit = (
        "samples/s, steady state"
        if measure == "samples_per_sec"
        else "seconds from the start of the process to its end"
    )
    drawn[-1].set_xlabel(f"{unit}\n{_source(known[0])}", fontsize=10)
    _write(figure, path, _digest_of(rows, measure))


def _panel(axes: Axes, rows: Sequence[Row], measure: str, first: str) -> None:
    base = next((row[measure]["median"] for row in rows if row["configuration"] == first and row[measure]), None)
    for place, row in enumerate(rows):
        value = row[measure]
        if value is None:
            reason = describe_errors(row).partition(":")[0] or "not measured"
            _label(axes, reason, 0, place, fontsize=10, color=_RED)
            continue
        median = value["median"]
        axes.barh(place, median, color=_GREY if row["configuration"] == first else _BLUE, height=0.62)
        if value["min"] < value["max"]:
            spread = [[median - value["min"]], [value["max"] - median]]
            axes.errorbar(median, place, xerr=spread, color="black", capsize=3, linewidth=1.0)
        text = f"{median:,.0f}" if measure == "samples_per_sec" else f"{median:.1f}"
        if base is not None and row["configuration"] != first:
            text += f"  ×{median / base if measure == 'samples_per_sec' else base / median:.2f}"
        _label(axes, text, value["max"], place, fontsize=10)
    _name_configurations(axes, [row["configuration"] for row in rows])
    _plain(axes)
    axes.grid(visible=False, axis="y")


def seed_dots(rows: Sequence[Row], path: Path) -> None:
    """Draw the accuracy of each configuration and seed as a dot, and each configuration's mean as a line."""
    configurations = list(dict.fromkeys(row["configuration"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    figure = _figure(1.5 + 0.34 * len(configurations))
    axes = figure.add_subplot()
    labelled: set[int] = set()
    for place, configuration in enumerate(configurations):
        known = [row for row in rows if row["configuration"] == configuration and row["accuracy"]]
        if not known:
            continue
        mean = statistics.fmean(row["accuracy"]["median"] for row in known)
        axes.plot([mean, mean], [place - 0.32, place + 0.32], color="black", linewidth=1.6, zorder=2)
        for row in known:
            number, values = seeds.index(row["seed"]), row["accuracy"]["runs"]
            label = f"seed {row['seed']}" if row["seed"] not in labelled else None
            labelled.add(row["seed"])
            colour, marker = _COLOURS[number % len(_COLOURS)], "osD^v"[number % 5]
            places = [place] * len(values)
            axes.scatter(values, places, s=34, color=colour, marker=marker, alpha=0.9, label=label, zorder=3)
    _name_configurations(axes, configurations)
    axes.set_xlabel(
        f"accuracy of the last evaluation; a line is the configuration's mean\n{_source(rows[0])}", fontsize=10
    )
    axes.legend(fontsize=10, frameon=False, ncols=len(seeds), loc="lower right", bbox_to_anchor=(1.0, 1.0))
    _plain(axes)
    _write(figure, path, _digest_of(rows, "accuracy"))


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")


def _label(axes: Axes, text: str, x: float, y: float, **style: Any) -> None:
    """Write just to the right of a point."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", **style)


def _name_configurations(axes: Axes, configurations: Sequence[str]) -> None:
    """Label the configurations from top to bottom."""
    axes.set_yticks(range(len(configurations)), configurations, fontsize=10)
    axes.set_ylim(len(configurations) - 0.4, -0.6)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _spell_point(row: Row) -> str:
    """Format a row's point in the matrix: ``batch size 128, seed 1``."""
    point = point_of(row).items()
    return ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in point)


def _source(row: Row, point: str = "") -> str:
    """What was measured and on which machine, for the line under a chart."""
    environment = row["environment"]
    return ", ".join(filter(None, [point, environment["gpu"] or "CPU", f"torch {environment['torch']}"]))


def _write(figure: Figure, path: Path, digest: str) -> None:
    """Write the figure as a PNG that contains :func:`_digest_of` its rows."""
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={_DIGEST: digest})
    write_atomically(path, image.getvalue())


def _digest_of(rows: Sequence[Row], shown: str) -> str:
    """A digest of configurations, points and values of ``shown``, the name of a measurement."""
    values = [[row["configuration"], point_of(row), row.get(shown), row.get("error_kinds")] for row in rows]
    return hashlib.sha256(json.dumps([shown, values], sort_keys=True).encode()).hexdigest()


class _Kind(NamedTuple):
    draw: Callable[[Sequence[Row], Path], None]
    needs: str  # keys that a row must have
    whole_call: bool = True  # draws all points of the matrix instead of the first one


_KINDS = {
    "waterfall": _Kind(waterfall, "samples_per_sec", whole_call=False),
    "losses": _Kind(loss_curves, "losses", whole_call=False),
    "bars": _Kind(configuration_bars, "samples_per_sec"),
    "seconds": _Kind(partial(configuration_bars, measure="process_seconds"), "process_seconds"),
    "seeds": _Kind(seed_dots, "accuracy"),
}


def last_call(rows: Sequence[Row], needs: str, configurations: Sequence[str] = ()) -> list[Row]:
    """The rows of the last call in which all configurations (by default: any) have ``needs``, at its first point.

    Raises:
        SystemExit: No call has them.
    """
    usable = [row for row in rows if row.get(needs) and (not configurations or row["configuration"] in configurations)]
    for call in sorted({row["call"] for row in usable}, reverse=True):
        of_call = [row for row in usable if row["call"] == call]
        found = {row["configuration"]: row for row in of_call if point_of(row) == point_of(of_call[0])}
        if set(configurations) <= set(found):
            return [found[configuration] for configuration in configurations or found]
    raise SystemExit(f"no call has rows of {', '.join(configurations) or 'any configuration'} with {needs}")


def _pick(kind: str, rows: Sequence[Row], configurations: Sequence[str] = ()) -> list[Row]:
    """The rows that a chart shows."""
    picked = last_call(rows, _KINDS[kind].needs, configurations)
    if _KINDS[kind].whole_call:  # including failed configurations, in the order of the table
        call = picked[0]["call"]
        picked = [
            row
            for row in rows
            if row["call"] == call and (not configurations or row["configuration"] in configurations)
        ]
    return [row for row in picked if row.get("accuracy")] if kind == "seeds" else picked


def draw_table(table: Row, rows: Sequence[Row], path: Path) -> bool:
    """Draw a call's rows in the kind that suits the table; return False if there is nothing to draw."""
    kind = kind_of(table, rows)
    if not any(row.get(_KINDS[kind].needs) for row in rows):
        return False
    _KINDS[kind].draw(_pick(kind, rows), path)
    return True


def kind_of(table: Row, rows: Sequence[Row]) -> str:
    """The kind of chart that suits a table's keys; see the top of this file."""
    if table.get("losses") and len({row["configuration"] for row in rows}) <= len(
        _COLOURS
    ):  # more cannot be distinguished
        return "losses"
    if "seed" in table.get("matrix", {}):
        return "seeds"
    if table.get("cumulative"):
        return "waterfall"
    return "seconds" if table.get("fresh") else "bars"


class Chart(NamedTuple):
    """A chart requested on the command line or by a comment in a document."""

    kind: str
    table: str
    path: Path
    configurations: list[str]

    @classmethod
    def of(cls, words: Sequence[str]) -> Chart:
        """Parse ``KIND TABLE FILE.png [CONFIGURATION | CONFIGURATION …]``."""
        kind, table, path, *names = words
        return cls(kind, table, Path(path), [name.strip() for name in " ".join(names).split("|") if name.strip()])

    def rows(self, results: Path = COMMITTED) -> list[Row]:
        """The rows that it shows.

        Raises:
            SystemExit: There are no such rows.
        """
        path = results / f"{self.table}.jsonl"
        if not path.is_file():
            raise SystemExit(f"{path}: no such rows; measure them with python -m benchmarks.run {self.table}")
        picked = _pick(self.kind, read_rows(path), self.configurations)
        if self.kind == "seeds" and any("seed" not in row for row in picked):
            raise SystemExit(f"{path}: its rows are of one seed; draw bars")
        return picked

    def is_stale(self) -> bool:
        """Whether the committed rows differ from those that the file shows."""
        if not self.path.is_file():
            return True
        with Image.open(self.path) as image:
            return image.info.get(_DIGEST) != _digest_of(self.rows(), _KINDS[self.kind].needs)

    def draw(self, results: Path = COMMITTED) -> None:
        """Write the file.

        Raises:
            SystemExit: There are no such rows, or too many for one chart.
        """
        try:
            _KINDS[self.kind].draw(self.rows(results), self.path)
        except ValueError as error:
            raise SystemExit(str(error)) from error


def main(arguments: Sequence[str], results: Path = COMMITTED) -> None:
    if len(arguments) < 3 or arguments[0] not in _KINDS:
        print(__doc__)
        raise SystemExit(2)
    Chart.of(arguments).draw(results)


if __name__ == "__main__":
    main(sys.argv[1:])
