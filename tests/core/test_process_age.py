"""The age of a process, compared with its parent's clock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from composer_speedups.core.process_age import process_age
from tests.conftest import ROOT

CHILD = "import time; time.sleep(0.2); from composer_speedups.core.process_age import process_age; print(process_age())"


def test_the_age_is_at_most_the_time_since_the_parent_started_the_process() -> None:
    started = time.perf_counter()
    ages = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    elapsed = time.perf_counter() - started
    assert 0.2 <= float(ages) <= elapsed + 0.05, "the operating system counts hundredths of a second"


def test_without_linuxs_files_psutil_tells_the_age(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Path) -> str:
        raise FileNotFoundError

    known, created = process_age(), psutil.Process().create_time()
    monkeypatch.setattr(Path, "read_text", missing)
    before, age, after = time.time(), process_age(), time.time()
    assert before - created - 0.5 <= age <= after - created + 0.5
    monkeypatch.undo()
    assert known - 2 <= age <= process_age() + 2, "psutil may be a second off"
