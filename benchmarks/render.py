"""python -m benchmarks.render [--check]: write the figures of README.md, docs and the cards from the committed rows,
and the stub of the package from its public names.

A figure stands between ``<!-- rows: KIND ARGUMENTS -->`` and ``<!-- end rows -->``. Its kind is a function of
:mod:`benchmarks.tables`, and its arguments are that one's:

- from the code and the cards: ``techniques``, ``order``, ``ranks``, ``conflicts NAME``;
- from tests/helpers/refusals.py, which the tests hold to what happens: ``families``, ``families_short``, ``heads``,
  ``refusals``;
- from tests/helpers/support.py: ``tasks``, ``support_legend``, and with tests/supported.json, what marked tests
  recorded, ``support``;
- from the rows: ``ladder``, ``summary TABLE``, ``effect TABLE CONFIGURATION | BEFORE``,
  ``steps TABLE``, ``best TABLE [KEY=VALUE …] | …``, ``call TABLE [N]``, ``jobs TABLE``,
  ``starts TABLE``, ``kernels TABLE``, ``kinds OVERRIDE``, ``accuracy TABLE [CONFIGURATION | CONFIGURATION …]``,
  ``across TABLE KEY=VALUE; CONFIGURATION | …``, ``suite``, ``mutants``; ``GPU/TABLE`` names the rows of another GPU.

``<!-- value: EXPRESSION -->…<!-- end -->`` in a sentence is a single value of the rows: :mod:`benchmarks.values`.

``<!-- chart: KIND TABLE FILE.png [CONFIGURATION | …] -->`` stands before an image, which :mod:`benchmarks.charts` draws
anew when its rows are others than it shows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import tables
from benchmarks.charts import Chart
from benchmarks.stub import package_catalogue, package_stub
from benchmarks.values import render_values

ROOT = Path(__file__).parent.parent
STUB = ROOT / "composer_speedups" / "__init__.pyi"
CATALOGUE = ROOT / "composer_speedups" / "_catalogue.json"
_FIGURE = re.compile(r"(<!-- rows: (.*?) -->\n).*?(<!-- end rows -->)", re.DOTALL)
_CHART = re.compile(r"<!-- chart: (.*?) -->")
_OF_CODE = "techniques order ranks conflicts families families_short heads refusals tasks support support_legend"
_OF_ROWS = "ladder summary effect steps best call jobs starts kernels kinds accuracy across suite mutants"
_KINDS = f"{_OF_CODE} {_OF_ROWS}".split()


def documents() -> list[Path]:
    """README.md, the files in docs, and every technique's card."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "composer_speedups" / "algorithms").glob("*/README.md")),
    ]


def render(text: str) -> str:
    """The text with every figure and every value rewritten from the rows.

    Raises:
        ValueError: No row has a figure or value.
    """
    return render_values(_FIGURE.sub(lambda m: f"{m[1]}{_figure(m[2])}\n{m[3]}", text))


def charts_of(text: str) -> list[Chart]:
    """The charts that a document requests, with paths in this repository."""
    charts = [Chart.of(request.split()) for request in _CHART.findall(text)]
    return [chart._replace(path=ROOT / chart.path) for chart in charts]


def _figure(request: str) -> str:
    kind, _, rest = request.partition(" ")
    if kind not in _KINDS:
        raise ValueError(f"no figure of kind {kind!r}")
    name, _, more = rest.partition(" ")
    if kind in ("across", "best"):
        arguments = [part.strip() for part in rest.split("|")]
    else:
        arguments = [name, *(part.strip() for part in more.split("|"))] if more else rest.split()
    return "\n".join(getattr(tables, kind)(*arguments))


def main(arguments: Sequence[str]) -> None:
    check, stale = "--check" in arguments, []
    for path in documents():
        text = path.read_text()
        try:
            rendered = render(text)
        except ValueError as error:
            raise SystemExit(f"{path.relative_to(ROOT)}: {error}") from error
        charts = [chart for chart in charts_of(text) if chart.is_stale()]
        stale += [*(chart.path for chart in charts), *([path] if rendered != text else [])]
        if not check:
            for chart in charts:
                chart.draw()
            path.write_text(rendered)
    for generated, text in ((CATALOGUE, package_catalogue()), (STUB, package_stub())):
        if not generated.exists() or generated.read_text() != text:
            stale.append(generated)
            if not check:
                generated.write_text(text)
    if stale:
        print("stale:" if check else "written:", *(path.relative_to(ROOT) for path in stale))
    raise SystemExit(1 if stale and check else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
