"""What the charts share: size, colours, the line that says where rows are from, PNGs that know what they show."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.rows import Row, point_of
from composer_speedups.core.files import write_atomically

__all__ = [
    "BLUE",
    "COLOURS",
    "GREY",
    "RED",
    "WIDTH",
    "digest_in",
    "digest_of",
    "plain",
    "source",
    "spell_point",
    "write_png",
]

WIDTH = 8.0  # inches, at 150 dots an inch; README shows it at some 800 pixels
BLUE, RED, GREY = "#2b7bba", "#c44e52", "#555555"
COLOURS = (RED, BLUE, "#3a923a", "#8c564b")
_DRAWN = "Rows"  # a text of the PNG


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


def write_png(figure: Figure, path: Path, drawn: str) -> None:
    """The figure as a PNG that holds :func:`digest_of` what it shows."""
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={_DRAWN: drawn})
    write_atomically(path, image.getvalue())


def digest_of(rows: Sequence[Row], shown: str) -> str:
    """Tells charts of other arms, points or values of ``shown``, a measurement's name, apart."""
    values = [[row["arm"], point_of(row), row.get(shown), row.get("error_kinds")] for row in rows]
    return hashlib.sha256(json.dumps([shown, values], sort_keys=True).encode()).hexdigest()


def digest_in(path: Path) -> str | None:
    """The digest that a PNG holds; None where there is no file, or one that holds none."""
    if not path.is_file():
        return None
    with Image.open(path) as image:
        return image.info.get(_DRAWN)
