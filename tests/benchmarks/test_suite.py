"""The summary of a test run as a row: counts, reasons, names, and no row of nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import suite, tables
from benchmarks.rows import read_rows

TESTS = """
import pytest

@pytest.mark.parametrize("x", [1, 2, 3])
def test_good(x): pass

def test_bad(): assert False

@pytest.fixture
def broken(): raise OSError

def test_error(broken): pass

@pytest.mark.xfail
def test_known(): assert False

@pytest.mark.skip(reason="needs a moon")
def test_away(): pass
"""
QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--rootdir=."]


def test_a_row_has_counts_reasons_failures_and_where_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"gpu": "NVIDIA H200", "gpu_count": 2, "torch": "2.11.0", "commit": "0123456789"}
    monkeypatch.setattr(suite, "environment", lambda: where)
    Path("test_toy.py").write_text(TESTS)
    assert suite.main([*QUIET, "test_toy.py"], Path("results")) == 1
    (row,) = read_rows(Path("results/nvidia-h200/suite.jsonl"))
    counts = {kind: row[kind] for kind in ("passed", "failed", "skipped", "expected_failures")}
    assert counts == {"passed": 3, "failed": 2, "skipped": 1, "expected_failures": 1}
    assert row["failures"] == ["test_toy::test_bad", "test_toy::test_error"]
    assert row["skip_reasons"] == {"needs a moon": 1}
    assert row["arguments"] == [*QUIET, "test_toy.py"]
    assert row["environment"] == where
    assert row["seconds"] > 0


def test_a_call_in_which_no_test_ran_leaves_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    Path("test_toy.py").write_text(TESTS)
    with pytest.raises(SystemExit, match=r"no test ran \(needs a moon\); no row is written"):
        suite.main([*QUIET, "test_toy.py", "-k", "away"], Path("results"))
    assert not Path("results").exists()
    assert suite.main([*QUIET, "test_toy.py", "-k", "known"], Path("results")) == 0, "a test that fails as expected ran"
    assert "0 passed, 0 failed, 0 skipped, 1 failed as expected in" in capsys.readouterr().out
    assert [row["status"] for row in read_rows(next(Path("results").glob("*/suite.jsonl")))] == [0]


def test_of_equal_calls_the_last_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(call: str, passed: int, *arguments: str, gpus: int = 1) -> dict[str, object]:
        where = {"gpu": "H200", "gpu_count": gpus, "torch": "2.11", "transformers": "5.17", "commit": "0123456789"}
        counts = {"passed": passed, "failed": 0, "skipped": 4, "seconds": 90.0}
        return {"call": call, "arguments": list(arguments), **counts, "environment": where}

    rows = [
        row("2026-01-01", 1, "-m", "gpu"),
        row("2026-01-03", 2, "-m", "gpu"),
        row("2026-01-02", 3, "-n", "2", "-m", "not long"),
        row("2026-01-04", 5, "-m", "gpu", gpus=2),
    ]
    monkeypatch.setattr(tables, "every_gpus_rows", lambda name: rows)
    lines = tables.suite()
    assert lines[2:] == [
        "| `-m gpu` | 2 | 0 | 4 | 1.5 | H200, torch 2.11, transformers 5.17 | 2026-01-03, 0123456 |",
        "| `-n 2 -m 'not long'` | 3 | 0 | 4 | 1.5 | H200, torch 2.11, transformers 5.17 | 2026-01-02, 0123456 |",
        "| `-m gpu` | 5 | 0 | 4 | 1.5 | 2 H200, torch 2.11, transformers 5.17 | 2026-01-04, 0123456 |",
    ]
