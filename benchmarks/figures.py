"""The figures of README.md and the cards: Markdown tables from the committed rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["accuracy", "committed", "effect", "ladder", "rows_of", "summary", "where_of"]

RESULTS = Path(__file__).parent / "results" / "nvidia-h200"
Row = dict[str, Any]


def committed(table: str, results: Path | None = None) -> list[Row]:
    """All rows of a table that are kept in ``results``, by default those of this repository's GPU."""
    return [json.loads(line) for line in ((results or RESULTS) / f"{table}.jsonl").read_text().splitlines()]


def rows_of(table: str) -> list[Row]:
    """The committed rows of a table that have measurements."""
    return [row for row in committed(table) if row["environment"]]  # a row of failed runs alone has none


def ladder() -> list[str]:
    """The whole first table: an arm is compared with fp32."""
    rows = rows_of("ladder")
    lines = [
        "| techniques | batch | samples/s (least–most) | over fp32 | peak GiB | warm-up s | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((row["data.batch_size"], row["arm"]) for row in rows)
    for batch, arm in sorted(keys, key=lambda key: key[0]):  # arms stay in the order of the table
        found = _find(rows, arm, batch)
        rates = _runs(found, "samples_per_sec")
        lines.append(
            f"| {arm} | {batch} | {_spell(rates)} | {_ratio_or_dash(rows, arm, 'fp32', batch)} "
            f"| {_median(found, 'peak_memory_gib'):.1f} | {_median(found, 'warmup_seconds'):.0f} | {len(rates)} |"
        )
    return [*lines, "", where_of(rows)]


def _find(rows: Sequence[Row], arm: str, batch: int) -> list[Row]:
    return [row for row in rows if row["arm"] == arm and row["data.batch_size"] == batch]


def _runs(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows for value in row[name]["runs"]]


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median(_runs(rows, name))


def _spell(rates: Sequence[float]) -> str:
    if len(rates) == 1:
        return f"{rates[0]:,.0f}, one run"
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"


def _ratio(rows: Sequence[Row], arm: str, base: str, batch: int) -> float:
    """Samples/s of one arm over another's, in the calls that ran both."""
    rates = {
        name: {row["call"]: row["samples_per_sec"]["median"] for row in _find(rows, name, batch)}
        for name in (arm, base)
    }
    return statistics.median(rates[arm][call] / rates[base][call] for call in rates[arm] if call in rates[base])


def _ratio_or_dash(rows: Sequence[Row], arm: str, base: str, batch: int) -> str:
    """A dash where no call ran both."""
    calls = [{row["call"] for row in _find(rows, name, batch)} for name in (arm, base)]
    return f"{_ratio(rows, arm, base, batch):.2f}" if calls[0] & calls[1] else "–"


def accuracy(table: str, only: Sequence[str] = ()) -> list[str]:
    """Accuracy by arm and seed; samples/s where each run had the machine to itself."""
    rows = [row for row in rows_of(table) if (not only or row["arm"] in only) and row["accuracy"]]
    arms: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], {}).setdefault(row["seed"], []).extend(row["accuracy"]["runs"])
    timed = all(row["samples_per_sec"] for row in rows)
    seeds = sorted({seed for by_seed in arms.values() for seed in by_seed})
    lines = [
        f"| arm | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |{' samples/s |' if timed else ''}",
        "|---" * (len(seeds) + 2 + timed) + "|",
    ]
    for arm, by_seed in arms.items():
        means = [statistics.fmean(by_seed[seed]) if seed in by_seed else None for seed in seeds]
        mean = None if None in means else statistics.fmean(filter(None, means))  # means of the same seeds compare
        line = f"| {arm} | {' | '.join('–' if m is None else f'{m:.4f}' for m in [*means, mean])} |"
        if timed:
            rates = _runs([row for row in rows if row["arm"] == arm], "samples_per_sec")
            line += f" {min(rates):,.0f}–{max(rates):,.0f} |"
        lines.append(line)
    return [*lines, "", where_of(rows)]


def effect(table: str, arm: str, before: str) -> list[str]:
    """One arm of a table beside another, in the calls that ran both."""
    rows = rows_of(table)
    lines = [f"| batch | {before}, samples/s | {arm} | ratio | peak GiB | warm-up s |", "|---|---|---|---|---|---|"]
    compared: list[Row] = []
    for batch in sorted({row["data.batch_size"] for row in rows}):
        calls = {row["call"] for row in _find(rows, arm, batch)} & {row["call"] for row in _find(rows, before, batch)}
        if not calls:
            continue
        old, new = ([row for row in _find(rows, name, batch) if row["call"] in calls] for name in (before, arm))
        compared += old + new
        lines.append(
            f"| {batch} | {_spell(_runs(old, 'samples_per_sec'))} | {_spell(_runs(new, 'samples_per_sec'))} "
            f"| {_ratio(rows, arm, before, batch):.2f} "
            f"| {_median(old, 'peak_memory_gib'):.1f} → {_median(new, 'peak_memory_gib'):.1f} "
            f"| {_median(old, 'warmup_seconds'):.0f} → {_median(new, 'warmup_seconds'):.0f} |"
        )
    return [*lines, "", where_of(compared)]


def where_of(rows: Sequence[Row]) -> str:
    """Hardware, versions, days and commits of the rows; more than one where they differ, nothing where none knows."""

    def each(name: str, form: str = "{}") -> str:
        values = {row["environment"].get(name) for row in rows} - {None}
        return form.format(", ".join(sorted(map(str, values)))) if values else ""

    def span(name: str, form: str) -> str:
        values = {round(row["environment"][name]) for row in rows if row["environment"].get(name) is not None}
        return form.format("–".join(map(str, sorted({min(values), max(values)})))) if values else ""

    on_gpu = any(row["environment"]["gpu"] for row in rows)
    commits = ", ".join(sorted({(row["environment"].get("commit") or "unknown")[:7] for row in rows}))
    parts = [
        each("gpu") if on_gpu else each("cpu", "CPU {}"),
        span("gpu_power_limit_watts", "limit {} W"),
        span("gpu_sm_clock_mhz", "SM clock {} MHz"),
        each("driver", "driver {}"),
        each("torch", "torch {}"),
        each("composer", "Composer {}"),
        each("transformers", "transformers {}"),
    ]
    days = ", ".join(sorted({row["call"][:10] for row in rows}))
    return f"{', '.join(filter(None, parts))}; {days}; commit {commits}."


def summary(table: str) -> list[str]:
    """Every arm of a table beside its first one: ratio of samples/s, peak memory and warm-up at each batch size."""
    rows = rows_of(table)
    batches = sorted({row["data.batch_size"] for row in rows})
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    columns = [f"{batch}: samples/s | ratio | peak GiB" for batch in batches]
    lines = [f"| {arms[0]}, or with | {' | '.join(columns)} | warm-up s |", "|---" * (3 * len(batches) + 2) + "|"]
    for arm in arms:
        cells, warmup = [], 0.0
        for batch in batches:
            found = [row for row in _find(rows, arm, batch) if row["samples_per_sec"]]
            if not found:
                cells.append("– | – | –")
                continue
            rate, peak = (_median(found, name) for name in ("samples_per_sec", "peak_memory_gib"))
            cells.append(f"{rate:,.0f} | {_ratio_or_dash(rows, arm, arms[0], batch)} | {peak:.1f}")
            warmup = max(warmup, _median(found, "warmup_seconds"))
        lines.append(f"| {arm} | {' | '.join(cells)} | {warmup:.0f} |")
    return [*lines, "", where_of(rows)]
