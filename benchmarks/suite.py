"""python -m benchmarks.suite PYTEST-ARGUMENTS: run tests and record their counts as a row.

    python -m benchmarks.suite -m gpu                 on a machine with a GPU; some tests need two
    python -m benchmarks.suite -m gpu tests/gpu       only those of a folder, if the time is limited
    python -m benchmarks.suite -m long -s             minutes each

All arguments are passed to pytest. The row in ``results/<gpu>/suite.jsonl`` (``cpu`` without a GPU) has the counts,
duration, commit, date, versions and GPU. ``python -m benchmarks.render`` writes the rows to docs/RELIABILITY.md. The
exit status is pytest's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import RESULTS, append_row, call_time
from composer_speedups.train.environment import environment


def main(arguments: Sequence[str], results: Path = RESULTS) -> int:
    """Run pytest in a child process, append the row, and return pytest's exit status."""
    call, began = call_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
        status = subprocess.run(command).returncode
        counts = next(ET.parse(report).iter("testsuite")).attrib if report.exists() else {"tests": 0, "skipped": 0}
    failed = int(counts.get("failures", 0)) + int(counts.get("errors", 0))
    passed = int(counts["tests"]) - int(counts["skipped"]) - failed
    if not passed + failed:
        raise SystemExit("benchmarks.suite: no test ran; no row is written")
    # CUDA is initialized only now, so that this process does not occupy the GPU during the tests.
    row = {
        "table": "suite",
        "call": call,
        "arguments": list(arguments),
        "passed": passed,
        "failed": failed,
        "skipped": int(counts["skipped"]),
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "environment": environment(),
    }
    append_row(row, "suite", results)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
