"""python -m benchmarks.render [--check]: write the figures of README.md and the cards from the committed rows.

A figure stands between ``<!-- rows: KIND ARGUMENTS -->`` and ``<!-- end rows -->``:

- ``ladder``: the whole first table;
- ``accuracy``: MiniLM's accuracy by arm and seed;
- ``effect ARM | BEFORE``: one arm of the ladder beside the one above it.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["documents", "render"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
_FIGURE = re.compile(r"(<!-- rows: (.*?) -->\n).*?(<!-- end rows -->)", re.DOTALL)
Row = dict[str, Any]


def documents() -> list[Path]:
    """README.md and every technique's card."""
    return [ROOT / "README.md", *sorted((ROOT / "composer_speedups" / "algorithms").glob("*/README.md"))]


def render(text: str) -> str:
    """The text with every figure written anew from the rows."""
    return _FIGURE.sub(lambda m: f"{m[1]}{_figure(m[2])}\n{m[3]}", text)


def _figure(request: str) -> str:
    kind, _, rest = request.partition(" ")
    if kind == "ladder":
        return "\n".join(_ladder(_rows("ladder")))
    if kind == "accuracy":
        return "\n".join(_accuracy(_rows("minilm")))
    if kind == "effect":
        arm, before = (part.strip() for part in rest.split("|"))
        return "\n".join(_effect(_rows("ladder"), arm, before))
    raise ValueError(f"no figure of kind {kind!r}")


def _rows(table: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{table}.jsonl").read_text().splitlines()]


def _ladder(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| techniques | batch | samples/s (least–most) | over fp32 | peak GiB | warm-up s | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    base: dict[int, float] = {}
    for row in rows:
        batch, rate = row["data.batch_size"], row["samples_per_sec"]
        ratio = rate["median"] / base.setdefault(batch, rate["median"])
        lines.append(
            f"| {row['arm']} | {batch} | {rate['median']:,.0f} ({rate['min']:,.0f}–{rate['max']:,.0f}) | {ratio:.2f} "
            f"| {row['peak_memory_gib']['median']:.1f} | {row['warmup_seconds']['median']:.0f} | {len(rate['runs'])} |"
        )
    return [*lines, "", _where(rows)]


def _accuracy(rows: Sequence[Row]) -> list[str]:
    arms: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], {}).setdefault(row["seed"], []).extend(row["accuracy"]["runs"])
    seeds = sorted({seed for by_seed in arms.values() for seed in by_seed})
    lines = [
        f"| arm | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | samples/s |",
        "|---" * (len(seeds) + 3) + "|",
    ]
    for arm, by_seed in arms.items():
        rates = [rate for row in rows if row["arm"] == arm for rate in row["samples_per_sec"]["runs"]]
        means = [statistics.fmean(by_seed[seed]) for seed in seeds]
        cells = " | ".join(f"{mean:.4f}" for mean in means)
        lines.append(f"| {arm} | {cells} | {statistics.fmean(means):.4f} | {min(rates):,.0f}–{max(rates):,.0f} |")
    return [*lines, "", _where(rows)]


def _effect(rows: Sequence[Row], arm: str, before: str) -> list[str]:
    lines = [f"| batch | {before} | {arm} | ratio | peak GiB | warm-up s |", "|---|---|---|---|---|---|"]
    found = {(row["arm"], row["data.batch_size"]): row for row in rows}
    for batch in sorted({row["data.batch_size"] for row in rows}):
        old, new = found[before, batch], found[arm, batch]
        rates = [row["samples_per_sec"] for row in (old, new)]
        shown = [f"{r['median']:,.0f}/s ({r['min']:,.0f}–{r['max']:,.0f})" for r in rates]
        memory = [row["peak_memory_gib"]["median"] for row in (old, new)]
        warmup = [row["warmup_seconds"]["median"] for row in (old, new)]
        lines.append(
            f"| {batch} | {shown[0]} | {shown[1]} | {rates[1]['median'] / rates[0]['median']:.2f} "
            f"| {memory[0]:.1f} → {memory[1]:.1f} | {warmup[0]:.0f} → {warmup[1]:.0f} |"
        )
    return [*lines, "", _where(rows)]


def _where(rows: Sequence[Row]) -> str:
    e = rows[0]["environment"]
    commits = ", ".join(sorted({row["environment"]["commit"][:7] for row in rows}))
    return (
        f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}, Composer {e['composer']}, "
        f"transformers {e['transformers']}, {rows[0]['date']}, commit {commits}."
    )


def main(arguments: Sequence[str]) -> None:
    stale = []
    for path in documents():
        text = path.read_text()
        if render(text) != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(render(text))
    if stale:
        print("stale:" if "--check" in arguments else "written:", *stale)
    raise SystemExit(1 if stale and "--check" in arguments else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
