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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import accuracy, effect, ladder, summary
from benchmarks.order_table import clashes_of, order_table, ranks_table
from benchmarks.peer_figures import jobs, kernels, starts, steps
from benchmarks.printed import last_calls
from benchmarks.profile_figures import kinds

if TYPE_CHECKING:
    from benchmarks.charts import Chart

__all__ = ["charts_of", "documents", "render"]

ROOT = Path(__file__).parent.parent
_FIGURE = re.compile(r"(<!-- rows: (.*?) -->\n).*?(<!-- end rows -->)", re.DOTALL)
_CHART = re.compile(r"<!-- chart: (.*?) -->")


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
    from benchmarks.charts import Chart  # Matplotlib, which figures do without

    charts = [Chart.of(request.split()) for request in _CHART.findall(text)]
    return [chart._replace(path=ROOT / chart.path) for chart in charts]


def _figure(request: str) -> str:
    kind, _, rest = request.partition(" ")
    if kind == "order":
        return "\n".join(order_table())
    if kind == "ranks":
        return "\n".join(ranks_table())
    if kind == "clashes":
        return "\n".join(clashes_of(rest))
    if kind == "ladder":
        return "\n".join(ladder())
    if kind == "kinds":
        return "\n".join(kinds(rest))
    table, _, names = rest.partition(" ")
    arms = [part.strip() for part in names.split("|")] if names else []
    if kind == "accuracy":
        return "\n".join(accuracy(table, arms))
    if kind == "summary":
        return "\n".join(summary(table))
    if kind == "steps":
        return "\n".join(steps(table))
    if kind == "call":
        return "\n".join(last_calls(table, int(names or 1)))
    if kind == "jobs":
        return "\n".join(jobs(table))
    if kind == "starts":
        return "\n".join(starts(table))
    if kind == "kernels":
        return "\n".join(kernels(table))
    if kind == "effect":
        return "\n".join(effect(table, *arms))
    raise ValueError(f"no figure of kind {kind!r}")


def main(arguments: Sequence[str]) -> None:
    stale = []
    for path in documents():
        text = path.read_text()
        for chart in charts_of(text):
            if chart.is_stale():
                stale.append(str(chart.path.relative_to(ROOT)))
                if "--check" not in arguments:
                    chart.draw()
        rendered = render(text)
        if rendered != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(rendered)
    if stale:
        print("stale:" if "--check" in arguments else "written:", *stale)
    raise SystemExit(1 if stale and "--check" in arguments else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
