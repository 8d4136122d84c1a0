"""Profiled steps side by side: milliseconds by kind of kernel."""

from __future__ import annotations

from typing import Any

from benchmarks.figures import rows_of, where_of
from benchmarks.kernels import kind_of

__all__ = ["kinds"]

Row = dict[str, Any]


def kinds(override: str) -> list[str]:
    """The profiles whose command line holds an override, a column each: kinds of kernels, the slowest first.

    Kinds are told from the names of the kernels that a row keeps, its slowest; ``less`` is what the others took.
    """
    rows = {_name(row): row for row in rows_of("profile") if override in row["arguments"]}  # the last of each name
    columns = {name: _by_kind(row) for name, row in rows.items()}
    every = dict.fromkeys(kind for column in columns.values() for kind in column)
    order = sorted(every, key=lambda kind: -max(column.get(kind, 0.0) for column in columns.values()))
    lines = [f"| ms a step | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    for kind in order:
        cells = (f"{columns[name][kind]:.1f}" if kind in columns[name] else "–" for name in rows)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    for label, key in (
        ("a kernel runs", "busy_ms"),
        ("step", "step_ms"),
        ("its products alone, bf16", "gemm_floor_ms"),
    ):
        lines.append(f"| **{label}** | {' | '.join(f'{row[key]:.1f}' for row in rows.values())} |")
    return [*lines, "", where_of(list(rows.values()))]


def _name(row: Row) -> str:
    """What sets the run apart: the fast set, compiled, or compiled with float8."""
    techniques = row["algorithms"]
    if "fused_layers" in techniques:
        return "fast set"
    if "float8_linear" in techniques:
        recipe = "rowwise" if "rowwise" in techniques["float8_linear"]["settings"] else "tensorwise"
        return f"compiled, float8 {recipe}"
    return "compiled"


def _by_kind(row: Row) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel in row["kernels"]:
        kind = kind_of(kernel["name"])
        found[kind] = found.get(kind, 0.0) + kernel["ms"]
    rest = row["busy_ms"] - sum(found.values())
    if rest > 0.05:
        found["less"] = rest
    return found
