"""Why a run failed: told apart by its exit status and output, and said in a few words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from composer_speedups.train.failed_process import own_line, ran_out_of_memory

__all__ = ["failure", "reason", "spelled"]

_KEPT = 2000  # characters of the output
_SAID = 110  # characters in a table


def failure(status: int, output: str) -> dict[str, Any]:
    """What a report holds in place of measurements: ``error``, and ``error_kind`` of it.

    The kinds are ``out of memory``, ``refused`` (train.py's one line about a config, or about what is not installed
    or not there) and ``failed``.
    """
    kind = "failed"
    if ran_out_of_memory(status, output):
        kind = "out of memory"
    elif status == 2:
        kind = "refused"
    return {"error": f"exit status {status}: {output.strip()[-_KEPT:]}", "error_kind": kind}


def reason(error: str) -> str:
    """The one line of an error that says most: train.py's own, or else the last."""
    return own_line(error) or "no output"


def spelled(row: dict[str, Any]) -> str:
    """The failed runs of a row for a table's cell; empty when there are none."""
    errors = row["errors"]
    if not errors:
        return ""
    kinds = row.get("error_kinds") or ["failed"] * len(errors)  # rows from before kinds were kept
    kind, count = Counter(kinds).most_common(1)[0]
    said = kind if kind == "out of memory" else f"{kind}: {_short(reason(errors[kinds.index(kind)]))}"
    return said if len(errors) == row["repeats"] == count else f"{len(errors)} of {row['repeats']} runs {said}"


def _short(line: str) -> str:
    line = line.replace("|", "/")
    return line if len(line) <= _SAID else line[:_SAID].rsplit(" ", 1)[0] + " …"
