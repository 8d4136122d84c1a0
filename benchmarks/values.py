"""Numbers in prose: single values from the committed rows, which :mod:`benchmarks.render` writes into the documents.

A value must not begin a line, where Markdown would start a block of HTML::

    trains <!-- value: fast batch=128; fast set / best peer; samples/s -->1.55<!-- end --> times as many samples/s

``TABLE [KEY=VALUE …]; CONFIGURATION [/ OTHER]; MEASURE [WHAT] [; FORMAT]``:

- ``TABLE`` and keys select rows; ``GPU/TABLE`` names the folder of another GPU in ``benchmarks/results``. ``KEY`` is a
  key of the row (``batch`` is ``data.batch_size``, ``length`` is ``data.max_length``) or of an override on its command
  line. ``KEY!=VALUE`` excludes rows.
- ``CONFIGURATION`` is a configuration's name in the table, or for a profile the name of a column. ``best peer`` is the
  configuration of HF Trainer, without techniques of this package, with the most samples/s. ``A / B`` divides A's
  measure by B's in the same call. A call is one invocation of ``benchmarks.run``.
- ``MEASURE`` is one of :data:`MEASURES`, ``kind NAME`` (a profile's milliseconds per step of one kind of kernel), a key
  of the row with dots (``startup.imports_seconds``), or ``name``, the configuration's name.
- ``WHAT``: nothing for the median of the runs, ``spread`` (least–most), ``deviation`` (standard deviation of a sample),
  ``calls`` or ``runs``, their number (of A's runs, for ``A / B``).
- ``FORMAT`` is Python's, such as ``.0%``.

A value comes from the last call that has all named configurations; ``spread``, ``deviation``, ``calls`` and ``runs``
cover all such calls. ``best peer`` is chosen in the last call with the most configurations of HF Trainer, because a
call with fewer may lack the best one. A call counts if this configuration was the fastest of HF Trainer in it, too.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import tables
from benchmarks.rows import Row, median_step, point_of, spell

BEST_PEER = "best peer"
MEASURES: dict[str, tuple[Callable[[Row], Sequence[float]], str]] = {  # the values of a row's runs, and their format
    "samples/s": (lambda row: row["samples_per_sec"]["runs"], ",.0f"),
    "tokens/s": (lambda row: row["tokens_per_sec"]["runs"], ",.0f"),
    "step ms": (lambda row: [1e3 * median_step(row)], ".1f"),
    "step ms p90": (lambda row: [1e3 * p90 for _, _, p90 in filter(None, row["step_seconds_p10_p50_p90"])], ".0f"),
    "peak GiB": (lambda row: row["peak_memory_gib"]["runs"], ".1f"),
    "warm-up s": (lambda row: row["warmup_seconds"]["runs"], ".0f"),
    "process s": (lambda row: row["process_seconds"]["runs"], ".1f"),
    "run s": (lambda row: row["run_seconds"]["runs"], ".1f"),
    "accuracy": (lambda row: row["accuracy"]["runs"], ".4f"),
}
_ALIASES = {"batch": "data.batch_size", "length": "data.max_length"}
_WHATS = ("spread", "deviation", "calls", "runs")
_VALUE = re.compile(r"<!-- value: (.*?) -->([^\n]*?)<!-- end -->")


def render_values(text: str) -> str:
    """The text with every value written anew from the rows.

    Raises:
        ValueError: No row has a value, its expression is malformed, its end marker is missing, or it begins a line.
    """
    if wrong := re.search(r"^\s*(?:[-*]|\d+\.)?\s*<!-- value: .*", text, re.MULTILINE):
        raise ValueError(f"a value begins a line, where Markdown reads a block of HTML; move it: {wrong[0].strip()}")
    if text.count("<!-- value: ") != len(_VALUE.findall(text)):
        raise ValueError("a value has no <!-- end --> on its line")
    return _VALUE.sub(lambda match: f"<!-- value: {match[1]} -->{value(match[1])}<!-- end -->", text)


def without_values(text: str) -> str:
    """The text with an ellipsis in place of each value."""
    return _VALUE.sub("…", text)


def value(expression: str) -> str:
    """What the rows have for an expression, formatted.

    Raises:
        ValueError: No call has such rows, or the expression is spelled wrongly.
    """
    try:
        return _value(expression)
    except ValueError as error:
        raise ValueError(f"value '{expression}': {error}") from error


def select(selection: str) -> list[Row]:
    """The rows of ``TABLE KEY=VALUE …; CONFIGURATION`` that were timed.

    Raises:
        ValueError: There are none.
    """
    where, _, name = selection.partition(";")
    return [row for row in _of_table(where) if _name(row) == name.strip() and row["samples_per_sec"]] or _none(
        f"no row of '{selection}'"
    )


def last_call(where: str, *names: str) -> list[Row]:
    """One row for each named configuration, all of the last call of ``TABLE [KEY=VALUE …]`` that has them.

    Raises:
        ValueError: No call has them, or one has several rows of a configuration.
    """
    return _single(_calls(_of_table(where), names, "samples/s", where)[-1], where)


def _value(expression: str) -> str:
    parts = [part.strip() for part in expression.split(";")]
    if not 3 <= len(parts) <= 4:
        raise ValueError("expected TABLE [KEY=VALUE …]; CONFIGURATION [/ OTHER]; MEASURE [; FORMAT]")
    where, named, measured, *form = parts
    names = [name.strip() for name in named.split(" / ")]
    measure, what = _measure_and_what(measured)
    calls = _calls(_of_table(where), names, measure, where)
    if what == "calls":
        return str(len(calls))
    if what == "runs":
        return str(sum(len(_runs(row, measure)) for of_call in calls for row in of_call[0]))
    if what in ("spread", "deviation"):
        found = [number for of_call in calls for number in _numbers(of_call, measure)]
        if what == "deviation":
            if len(found) < 2:
                raise ValueError("one run has no standard deviation")
            found = [statistics.stdev(found)]
    else:
        single = _single(calls[-1], where)
        if measure == "name":
            return _name(single[0])
        found = [_over(calls[-1], measure)]
    standard = ".2f" if len(names) == 2 else MEASURES[measure][1] if measure in MEASURES else ".1f"
    spec = form[0] if form else standard
    return "–".join(dict.fromkeys(format(number, spec) for number in (min(found), max(found))))


def _single(of_call: Sequence[Sequence[Row]], where: str) -> list[Row]:
    """The only row of each configuration in a call."""
    if any(len(rows) > 1 for rows in of_call):
        raise ValueError(f"several rows of one call in {where}; add a key, such as seed=1")
    return [rows[0] for rows in of_call]


def _measure_and_what(text: str) -> tuple[str, str]:
    measure, _, last = text.rpartition(" ")
    return (measure or "name", last) if last in _WHATS else (text, "")


def _of_table(where: str) -> list[Row]:
    table, *given = where.split()
    rows = tables.rows_of(table) or _none(f"table {table} has no committed rows")
    return [row for row in rows if all(_has(row, item) for item in given)] or _none(
        f"no row of {table} has {', '.join(given)}"
    )


def _has(row: Row, item: str) -> bool:
    """Whether a row has ``KEY=VALUE`` among its keys or, as its last word on the key, on its command line."""
    key, _, wanted = item.partition("=")
    key, negated = key.removesuffix("!"), key.endswith("!")
    key = _ALIASES.get(key, key)
    given = str(row[key]) if key in row else tables.override_of(row, key)
    return (given == wanted) is not negated


def _name(row: Row) -> str:
    return str(row["configuration"]) if "configuration" in row else tables.profiled(row)


def _calls(rows: Sequence[Row], names: Sequence[str], measure: str, where: str) -> list[list[list[Row]]]:
    """For each call that has all the configurations, the rows of each of them; the last call is last."""
    found: list[
        tuple[str | None, int, list[list[Row]]]
    ] = []  # a call's best peer, its number of peers, the chosen rows
    of_names: list[Row] = []
    for call in sorted({row["call"] for row in rows}):
        known = [row for row in rows if row["call"] == call and _has_measure(row, measure)]
        peers = [row for row in known if _is_peer(row)]
        best = _name(max(peers, key=lambda row: row["samples_per_sec"]["median"])) if peers else None
        wanted = [best if name == BEST_PEER else name for name in names]
        chosen = [[row for row in known if _name(row) == name] for name in wanted]
        of_names += [row for same in chosen for row in same]
        if all(chosen):
            found.append((best, len(peers), chosen))
    points = {spell({k: v for k, v in point_of(row).items() if k != "seed"}) for row in of_names}
    if len(points) > 1:
        raise ValueError(f"rows at {' and at '.join(sorted(points))}; add a key to {where}, such as batch=128")
    if not found:
        known_names = ", ".join(sorted({_name(row) for row in rows if _has_measure(row, measure)}))
        raise ValueError(f"no call of {where} has {measure} of {' and '.join(map(repr, names))}; it has {known_names}")
    if BEST_PEER in names:
        most = max(peers for _, peers, _ in found)
        best = [best for best, peers, _ in found if peers == most][-1]
        found = [entry for entry in found if entry[0] == best]
    return [chosen for _, _, chosen in found]


def _is_peer(row: Row) -> bool:
    """Whether a row is of HF Trainer, without techniques of this package, and was timed."""
    ours = tables.override_of(row, "peer.apply_recommended") == "true"
    return row.get("peer") == "hf_trainer" and not ours and bool(row["samples_per_sec"])


def _numbers(of_call: Sequence[Sequence[Row]], measure: str) -> list[float]:
    """All runs of one configuration in a call, or the ratio of two."""
    if len(of_call) == 1:
        return [number for row in of_call[0] for number in _runs(row, measure)]
    if any(len(rows) > 1 for rows in of_call):
        raise ValueError("a ratio of several rows of one call; add a key, such as seed=1")
    return [_over(of_call, measure)]


def _over(of_call: Sequence[Sequence[Row]], measure: str) -> float:
    """The median of one row, or that of the first over that of the second."""
    medians = [statistics.median(_runs(rows[0], measure)) for rows in of_call]
    return medians[0] / medians[1] if len(medians) == 2 else medians[0]


def _has_measure(row: Row, measure: str) -> bool:
    try:
        return bool(_runs(row, measure))
    except ValueError:
        return False


def _runs(row: Row, measure: str) -> Sequence[float]:
    """The measure of each run of a row."""
    try:
        if measure == "name":
            return MEASURES["samples/s"][0](row)
        if measure in MEASURES:
            return MEASURES[measure][0](row)
        if measure.startswith("kind "):
            return [tables.ms_by_kind(row)[measure.removeprefix("kind ")]]
        found: Any = row
        for key in measure.split("."):
            found = found[key]
        return found["runs"] if isinstance(found, dict) else [float(found)]
    except (KeyError, TypeError, statistics.StatisticsError) as error:
        raise ValueError(f"the row of '{_name(row)}' has no {measure}") from error


def _none(message: str) -> list[Row]:
    raise ValueError(message)
