"""Charts that set arms side by side: bars with their spread, and accuracy by seed as dots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.canvas import BLUE, COLOURS, GREY, RED, WIDTH, digest_of, plain, source, spell_point, write_png
from benchmarks.failures import spelled
from benchmarks.rows import Row

__all__ = ["arm_bars", "seed_dots"]

_MEASURES = {
    "samples_per_sec": ("samples/s, steady state", "{:,.0f}"),
    "process_seconds": ("seconds from the start of the process to its end", "{:.1f}"),
}


def arm_bars(rows: Sequence[Row], path: Path, measure: str = "samples_per_sec") -> None:
    """Draw each arm's median as a bar with its least and greatest run, a panel for each point of the matrix.

    An arm without a value has the reason in its bar's place. The first arm is grey; the others say their ratio to it.

    Args:
        rows: Of one call, in the order of the table.
        path: PNG to write.
        measure: ``samples_per_sec``, or ``process_seconds``, where the ratio is the first arm's over the arm's.
    """
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(spell_point(row), []).append(row)
    heights = [0.5 + 0.36 * len(panel) for panel in panels.values()]
    figure = Figure(figsize=(WIDTH, 0.7 + sum(heights)), dpi=150, layout="constrained")
    drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    most = max(row[measure]["max"] for row in rows if row[measure])
    for axes, (point, panel) in zip(drawn, panels.items(), strict=True):
        _panel(axes, panel, measure, rows[0]["arm"], most)
        axes.set_title(point, fontsize=11, loc="left")
    known = next(row for row in rows if row[measure])
    drawn[-1].set_xlabel(f"{_MEASURES[measure][0]}\n{source(known)}", fontsize=10)
    write_png(figure, path, digest_of(rows, measure))


def _panel(axes: Axes, rows: Sequence[Row], measure: str, first: str, most: float) -> None:
    base = next((row[measure]["median"] for row in rows if row["arm"] == first and row[measure]), None)
    for place, row in enumerate(rows):
        value = row[measure]
        if value is None:
            said = spelled(row).partition(":")[0] or "not measured"
            axes.annotate(said, (0, place), (5, 0), textcoords="offset points", va="center", fontsize=10, color=RED)
            continue
        median = value["median"]
        axes.barh(place, median, color=GREY if row["arm"] == first else BLUE, height=0.62)
        if value["min"] < value["max"]:
            spread = [[median - value["min"]], [value["max"] - median]]
            axes.errorbar(median, place, xerr=spread, color="black", capsize=3, linewidth=1.0)
        text = _MEASURES[measure][1].format(median)
        if base is not None and row["arm"] != first:
            text += f"  ×{median / base if measure == 'samples_per_sec' else base / median:.2f}"
        at = (value["max"], place)
        axes.annotate(text, at, (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(rows)), [row["arm"] for row in rows], fontsize=10)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.28 * most)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    plain(axes)
    axes.grid(visible=False, axis="y")


def seed_dots(rows: Sequence[Row], path: Path) -> None:
    """Draw the accuracy of each arm and seed as a dot, and each arm's mean as a line across them.

    Args:
        rows: With ``seed`` and ``accuracy``, of one call, in the order of the table.
        path: PNG to write.
    """
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    figure = Figure(figsize=(WIDTH, 1.5 + 0.34 * len(arms)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    labelled: set[int] = set()
    for place, arm in enumerate(arms):
        known = [row for row in rows if row["arm"] == arm and row["accuracy"]]
        if not known:
            continue
        mean = statistics.fmean(row["accuracy"]["median"] for row in known)
        axes.plot([mean, mean], [place - 0.32, place + 0.32], color="black", linewidth=1.6, zorder=2)
        for row in known:
            number = seeds.index(row["seed"])
            values = row["accuracy"]["runs"]
            label = f"seed {row['seed']}" if row["seed"] not in labelled else None
            labelled.add(row["seed"])
            colour, marker = COLOURS[number % len(COLOURS)], "osD^v"[number % 5]
            places = [place] * len(values)
            axes.scatter(values, places, s=34, color=colour, marker=marker, alpha=0.9, label=label, zorder=3)
    axes.set_yticks(range(len(arms)), arms, fontsize=10)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_xlabel(f"accuracy of the last evaluation; a line is the arm's mean\n{source(rows[0])}", fontsize=10)
    axes.legend(fontsize=10, frameon=False, ncols=len(seeds), loc="lower right", bbox_to_anchor=(1.0, 1.0))
    plain(axes)
    write_png(figure, path, digest_of(rows, "accuracy"))
