"""python -m benchmarks.render [--check]: write the figures of README.md, docs and the cards from the committed rows.

A figure stands between ``<!-- rows: KIND ARGUMENTS -->`` and ``<!-- end rows -->``:

- ``order``: the order of techniques and their clashes, from the code;
- ``ranks``: which techniques go with DDP and FSDP, from the code;
- ``clashes NAME``: what one technique cannot go with, from the code;
- ``ladder``: the whole first table;
- ``summary TABLE``: every arm of a table beside its first one;
- ``effect TABLE ARM | BEFORE``: one arm of a table beside another;
- ``steps TABLE``: steady steps of every arm beside the first one's;
- ``call TABLE [N]``: every arm of the last call, or of the last N, as the runner prints it, failed ones and published
  figures too;
- ``jobs TABLE``: whole jobs, from process start to end, beside the first arm's;
- ``starts TABLE``: from process start to the first trained step;
- ``kernels TABLE``: fused_layers' kernels one by one beside PyTorch's;
- ``kinds OVERRIDE``: the profiles of the command lines that hold an override, by kind of kernel;
- ``accuracy TABLE [ARM | ARM …]``: MiniLM's accuracy by arm and seed.

``<!-- chart: KIND TABLE FILE.png [ARM | ARM …] -->`` stands before an image, which :mod:`benchmarks.charts` draws anew
when its rows are others than it shows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import tables
from benchmarks.charts import Chart

__all__ = ["charts_of", "documents", "render"]

ROOT = Path(__file__).parent.parent
_FIGURE = re.compile(r"(<!-- rows: (.*?) -->\n).*?(<!-- end rows -->)", re.DOTALL)
_CHART = re.compile(r"<!-- chart: (.*?) -->")
_KINDS = "order ranks clashes ladder summary effect steps jobs starts kernels kinds accuracy".split()
_FIGURES: dict[str, Callable[..., list[str]]] = {
    **{kind: getattr(tables, kind) for kind in _KINDS},
    "call": tables.last_calls,
}


def documents() -> list[Path]:
    """README.md, docs and every technique's card."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "composer_speedups" / "algorithms").glob("*/README.md")),
    ]


def render(text: str) -> str:
    """The text with every figure written anew from the rows."""
    return _FIGURE.sub(lambda m: f"{m[1]}{_figure(m[2])}\n{m[3]}", text)


def charts_of(text: str) -> list[Chart]:
    """The charts that a document asks for, in this repository."""
    charts = [Chart.of(request.split()) for request in _CHART.findall(text)]
    return [chart._replace(path=ROOT / chart.path) for chart in charts]


def _figure(request: str) -> str:
    kind, _, rest = request.partition(" ")
    if kind not in _FIGURES:
        raise ValueError(f"no figure of kind {kind!r}")
    name, _, more = rest.partition(" ")
    arguments = [name, *(part.strip() for part in more.split("|"))] if more else rest.split()
    return "\n".join(_FIGURES[kind](*arguments))


def main(arguments: Sequence[str]) -> None:
    check, stale = "--check" in arguments, []
    for path in documents():
        text = path.read_text()
        rendered, charts = render(text), [chart for chart in charts_of(text) if chart.is_stale()]
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
