"""python -m benchmarks.suite PYTEST-ARGUMENTS: run tests and record their counts as a row.

    python -m benchmarks.suite -m gpu                 on a machine with a GPU; some tests need two
    python -m benchmarks.suite -m gpu tests/gpu       a part of them, if a call must be short
    python -m benchmarks.suite -m long -s             minutes each

All arguments are passed to pytest. The row in ``results/<gpu>/suite.jsonl`` (``cpu`` without a GPU) has the counts, the
reasons of skipped tests, the names of failed ones, duration, commit, date, versions and GPU. ``python -m
benchmarks.render`` writes it to docs/RELIABILITY.md. The exit status is pytest's. If no test ran, nothing is recorded,
and the exit status is 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import RESULTS, Row, append_row, call_time
from composer_speedups.train.environment import environment

__all__ = ["summary_of"]

_FAILED = ("failure", "error")


def summary_of(report: Path) -> Row:
    """Counts, reasons of skipped tests and names of failed ones, from pytest's JUnit XML."""
    counts = Counter[str]()
    skipped, failed = Counter[str](), list[str]()
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag: child for child in case}
        if any(kind in kinds for kind in _FAILED):
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            expected = kinds["skipped"].get("type") == "pytest.xfail"
            counts["expected_failures" if expected else "skipped"] += 1
            skipped[str(kinds["skipped"].get("message"))] += not expected
        else:
            counts["passed"] += 1
    kinds_of_end = ("passed", "failed", "skipped", "expected_failures")
    return {**{kind: counts[kind] for kind in kinds_of_end}, "failures": failed, "skip_reasons": dict(+skipped)}


def main(arguments: Sequence[str], results: Path = RESULTS) -> int:
    """Run pytest in a child process, append the row, and return pytest's exit status.

    Raises:
        SystemExit: No test ran, so there is nothing to record.
    """
    call, began = call_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
        status = subprocess.run(command).returncode
        if not report.exists():
            raise SystemExit(f"benchmarks.suite: pytest ended with status {status} and left no report")
        summary = summary_of(report)
    if not any(summary[kind] for kind in ("passed", "failed", "expected_failures")):
        reasons = ", ".join(summary["skip_reasons"]) or "none was found"
        raise SystemExit(f"benchmarks.suite: no test ran ({reasons}); no row is kept")
    # CUDA is initialized only now, so that this process does not occupy the GPU during the tests.
    row = {
        "table": "suite",
        "call": call,
        "arguments": list(arguments),
        **summary,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "environment": environment(),
    }
    append_row(row, "suite", results)
    print(
        f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped in {row['seconds']:.0f} s: row kept"
    )
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
