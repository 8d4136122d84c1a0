"""python -m benchmarks.suite PYTEST-ARGUMENTS: run tests and record their counts as a row.

    python -m benchmarks.suite -m gpu                 on a machine with a GPU; some tests need two
    python -m benchmarks.suite -m gpu tests/gpu       only those of a folder, if the time is limited
    python -m benchmarks.suite -m long -s             minutes each

All arguments are passed to pytest. The row in ``results/<gpu>/suite.jsonl`` (``cpu`` without a GPU) has the counts, the
reasons why tests were skipped, the names of failed tests, the duration, commit, date, versions and GPU. ``python -m
benchmarks.render`` writes the rows to docs/RELIABILITY.md. The exit status is pytest's. If no test ran, no row is
written and the exit status is 1; a test that failed as expected (``xfail``) did run.
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

_OUTCOMES = ("passed", "failed", "skipped", "expected_failures")
_FAILED = ("failure", "error")  # elements of the XML: an assertion or error in a test, an error in a fixture


def summary_of(report: Path) -> Row:
    """Return the counts by outcome, the names of failed tests and the reasons of skipped ones, from pytest's JUnit XML.

    A test whose fixture raised an error counts as failed.
    """
    counts = Counter[str]()
    skipped, failed = Counter[str](), list[str]()
    for case in ET.parse(report).iter("testcase"):
        results = {child.tag: child for child in case}  # empty for a test that passed
        if any(tag in results for tag in _FAILED):
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in results:
            if results["skipped"].get("type") == "pytest.xfail":
                counts["expected_failures"] += 1
            else:
                counts["skipped"] += 1
                skipped[str(results["skipped"].get("message"))] += 1
        else:
            counts["passed"] += 1
    return {**{outcome: counts[outcome] for outcome in _OUTCOMES}, "failures": failed, "skip_reasons": dict(skipped)}


def main(arguments: Sequence[str], results: Path = RESULTS) -> int:
    """Run pytest in a child process, append the row, and return pytest's exit status.

    Raises:
        SystemExit: No test ran, or pytest could not run; no row is written.
    """
    call, began = call_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
        status = subprocess.run(command).returncode
        if not report.exists():
            raise SystemExit(f"benchmarks.suite: pytest ended with status {status} and left no report")
        summary = summary_of(report)
    if not any(summary[outcome] for outcome in _OUTCOMES if outcome != "skipped"):
        reasons = ", ".join(summary["skip_reasons"]) or "none was found"
        raise SystemExit(f"benchmarks.suite: no test ran ({reasons}); no row is written")
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
        f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped, {row['expected_failures']} failed "
        f"as expected in {row['seconds']:.0f} s: row written"
    )
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
