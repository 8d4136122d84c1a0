"""python -m benchmarks.render [--check]: write the figures of README.md and the cards from the committed rows.

A figure stands between ``<!-- rows: KIND ARGUMENTS -->`` and ``<!-- end rows -->``:

- ``order``: the order of techniques and their clashes, from the code;
- ``ladder``: the whole first table;
- ``accuracy``: MiniLM's accuracy by arm and seed;
- ``effect TABLE ARM | BEFORE``: one arm of a table beside another.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.order_table import order_table

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
    if kind == "order":
        return "\n".join(order_table())
    if kind == "ladder":
        return "\n".join(_ladder(_rows("ladder")))
    if kind == "accuracy":
        return "\n".join(_accuracy(_rows("minilm")))
    if kind == "effect":
        table, _, names = rest.partition(" ")
        arm, before = (part.strip() for part in names.split("|"))
        return "\n".join(_effect(_rows(table), arm, before))
    raise ValueError(f"no figure of kind {kind!r}")


def _rows(table: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{table}.jsonl").read_text().splitlines()]


def _ladder(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| techniques | batch | samples/s (least–most) | over fp32 | peak GiB | warm-up s | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((row["data.batch_size"], row["arm"]) for row in rows)
    for batch, arm in sorted(keys, key=lambda key: key[0]):  # arms stay in the order of the table
        found = _find(rows, arm, batch)
        rates = _runs(found, "samples_per_sec")
        lines.append(
            f"| {arm} | {batch} | {_spell(rates)} | {_ratio(rows, arm, 'fp32', batch):.2f} "
            f"| {_median(found, 'peak_memory_gib'):.1f} | {_median(found, 'warmup_seconds'):.0f} | {len(rates)} |"
        )
    return [*lines, "", _where(rows)]


def _find(rows: Sequence[Row], arm: str, batch: int) -> list[Row]:
    return [row for row in rows if row["arm"] == arm and row["data.batch_size"] == batch]


def _runs(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows for value in row[name]["runs"]]


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median(_runs(rows, name))


def _spell(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"


def _ratio(rows: Sequence[Row], arm: str, base: str, batch: int) -> float:
    """Samples/s of one arm over another's, in the calls that ran both."""
    rates = {
        name: {row["call"]: row["samples_per_sec"]["median"] for row in _find(rows, name, batch)}
        for name in (arm, base)
    }
    return statistics.median(rates[arm][call] / rates[base][call] for call in rates[arm] if call in rates[base])


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
        rates = _runs([row for row in rows if row["arm"] == arm], "samples_per_sec")
        means = [statistics.fmean(by_seed[seed]) for seed in seeds]
        cells = " | ".join(f"{mean:.4f}" for mean in means)
        lines.append(f"| {arm} | {cells} | {statistics.fmean(means):.4f} | {min(rates):,.0f}–{max(rates):,.0f} |")
    return [*lines, "", _where(rows)]


def _effect(rows: Sequence[Row], arm: str, before: str) -> list[str]:
    lines = [f"| batch | {before}, samples/s | {arm} | ratio | peak GiB | warm-up s |", "|---|---|---|---|---|---|"]
    compared: list[Row] = []
    for batch in sorted({row["data.batch_size"] for row in rows}):
        calls = {row["call"] for row in _find(rows, arm, batch)} & {row["call"] for row in _find(rows, before, batch)}
        old, new = ([row for row in _find(rows, name, batch) if row["call"] in calls] for name in (before, arm))
        compared += old + new
        lines.append(
            f"| {batch} | {_spell(_runs(old, 'samples_per_sec'))} | {_spell(_runs(new, 'samples_per_sec'))} "
            f"| {_ratio(rows, arm, before, batch):.2f} "
            f"| {_median(old, 'peak_memory_gib'):.1f} → {_median(new, 'peak_memory_gib'):.1f} "
            f"| {_median(old, 'warmup_seconds'):.0f} → {_median(new, 'warmup_seconds'):.0f} |"
        )
    return [*lines, "", _where(compared)]


def _where(rows: Sequence[Row]) -> str:
    """Hardware, versions, days and commits of the rows; more than one where they differ."""

    def each(name: str) -> str:
        return ", ".join(sorted({row["environment"][name] for row in rows}))

    days = ", ".join(sorted({row["call"][:10] for row in rows}))
    commits = ", ".join(sorted({row["environment"]["commit"][:7] for row in rows}))
    return (
        f"{each('gpu')}, driver {each('driver')}, torch {each('torch')}, Composer {each('composer')}, "
        f"transformers {each('transformers')}; {days}; commit {commits}."
    )


def main(arguments: Sequence[str]) -> None:
    stale = []
    for path in documents():
        text = path.read_text()
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
