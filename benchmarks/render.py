"""python -m benchmarks.render [--check]: write the tables and charts of README.md, docs and the cards.

A table stands between ``<!-- rows: KIND ARGUMENTS -->`` and ``<!-- end rows -->``. Its kind is a function of
:mod:`benchmarks.declared` (what the code declares) or :mod:`benchmarks.tables` (measured rows), and its arguments,
separated by ``|``, are that function's. ``TABLE [KEY=VALUE …]`` names the rows of every GPU, ``GPU/TABLE`` those of
one; new rows take the place of old ones as :mod:`benchmarks.tables` describes.

``<!-- chart: KIND FILE.png | TABLE [KEY=VALUE …] [| …] -->`` stands before an image, which
:mod:`benchmarks.charts` draws anew when its rows are others than it shows.

Sentences hold no measured figures, so that no marker is needed in them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import declared, tables
from benchmarks.charts import Chart

ROOT = Path(__file__).parent.parent
_FIGURE = re.compile(r"(<!-- rows: (.*?) -->\n).*?(<!-- end rows -->)", re.DOTALL)
_CHART = re.compile(r"<!-- chart: (.*?) -->")


def documents() -> list[Path]:
    """README.md, the files in docs, and every technique's card."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "composer_speedups" / "algorithms").glob("*/README.md")),
    ]


def render(text: str) -> str:
    """The text with every table written anew."""
    return _FIGURE.sub(lambda m: f"{m[1]}{_figure(m[2])}\n{m[3]}", text)


def charts_of(text: str) -> list[Chart]:
    """The charts that a document requests, with paths in this repository."""
    charts = [Chart.of(request) for request in _CHART.findall(text)]
    return [chart._replace(path=ROOT / chart.path) for chart in charts]


def _figure(request: str) -> str:
    kind, _, rest = request.partition(" ")
    selection, _, more = rest.partition(" | ")
    arguments = [part.strip() for part in (selection, *more.split(" | ")) if part]
    return "\n".join(getattr(declared if hasattr(declared, kind) else tables, kind)(*arguments))


def main(arguments: Sequence[str]) -> None:
    check, stale = "--check" in arguments, []
    for path in documents():
        text = path.read_text()
        rendered = render(text)
        charts = [chart for chart in charts_of(text) if chart.is_stale()]
        stale += [*(chart.path for chart in charts), *([path] if rendered != text else [])]
        if not check:
            for chart in charts:
                chart.draw()
            path.write_text(rendered)
    if stale:
        print("stale:" if check else "written:", *(path.relative_to(ROOT) for path in stale))
    raise SystemExit(1 if stale and check else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
