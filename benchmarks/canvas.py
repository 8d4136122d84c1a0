"""What the charts share: size, colours, the line that says where rows are from, and PNGs written whole."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rows import Row, point_of
from composer_speedups.files import write_atomically

__all__ = ["BLUE", "COLOURS", "GREY", "RED", "WIDTH", "plain", "source", "spell_point", "write_png"]

WIDTH = 8.0  # inches, at 150 dots an inch; README shows it at some 800 pixels
BLUE, RED, GREY = "#2b7bba", "#c44e52", "#555555"
COLOURS = (RED, BLUE, "#3a923a", "#8c564b")


def spell_point(row: Row) -> str:
    """A row's place in the matrix, for people: ``batch size 128, seed 1``."""
    point = point_of(row).items()
    return ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in point)


def source(row: Row, point: str = "") -> str:
    """What was measured and where, for the line under a chart."""
    environment = row["environment"]
    return ", ".join(filter(None, [point, environment["gpu"] or "CPU", f"torch {environment['torch']}"]))


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def write_png(figure: Figure, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())
