"""Calls of a table that stop or are killed: what is kept, what runs again, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run as runner
from benchmarks.rows import RESULTS, Call, read_rows
from benchmarks.table_file import read_table
from composer_speedups.sweep.processes import Job
from tests.benchmarks.test_run import REPORT, override_of, replace_runs, table
from tests.helpers.forks import Fork

ROWS = Path("results/cpu/table.jsonl")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def runs_of(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None, rate: float = 100.0) -> list[str]:
    """Put a fake in the place of runs; the last override of each, as they come."""
    seen: list[str] = []

    def report(job: Job) -> dict[str, Any]:
        if len(seen) == stop_after:
            raise KeyboardInterrupt
        seen.append(override_of(job))
        return {**REPORT, "throughput": {**REPORT["throughput"], "samples_per_sec": rate + len(seen)}}

    replace_runs(monkeypatch, report)
    return seen


def run(*overrides: str, **changes: Any) -> list[dict[str, Any]]:
    return runner.run_table(read_table(table(matrix={}, **changes), overrides), "table", Path("results"))


def test_a_resumed_call_runs_the_missing_runs_and_has_one_set_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs_of(monkeypatch, stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert "resume=true continues from results/cpu/table.jsonl" in capsys.readouterr().err
    first = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert [(row["configuration"], row["repeats"]) for row in first] == [("plain", 2), ("+ x", 1), ("+ y", 1)]
    seen = runs_of(monkeypatch, rate=200.0)
    rows = run("resume=true")
    assert seen == ["x=1", "y=1"]
    assert [json.loads(line) for line in ROWS.read_text().splitlines()] == rows
    assert {row["call"] for row in rows} == {row["call"] for row in first}
    assert rows[0]["samples_per_sec"]["runs"] == [101.0, 104.0]
    assert rows[1]["samples_per_sec"]["runs"] == [102.0, 201.0]
    assert not any("unfinished" in row for row in rows)
    assert "continues the call of" in capsys.readouterr().out
    seen = runs_of(monkeypatch)
    run("resume=true")  # nothing is unfinished: a new call
    assert len(seen) == 6


def test_an_abandoned_call_becomes_rows_when_a_new_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_of(monkeypatch, stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        run()
    runs_of(monkeypatch)
    rows = run()
    written = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert [(row["configuration"], row["repeats"]) for row in written[:2]] == [("plain", 1), ("+ x", 1)]
    assert written[2:] == rows
    assert len({row["call"] for row in written}) == 2


def test_no_committed_call_is_unfinished() -> None:
    """``resume=true`` can always be given, but would be refused after a call that was stopped at another commit."""
    unfinished = {str(path) for path in RESULTS.glob("*/*.jsonl") for row in read_rows(path) if "unfinished" in row}
    assert not unfinished, "remove the key from the rows of a call that nobody will resume"


@pytest.mark.parametrize(
    ("overrides", "changes", "commit", "differs"),
    [
        (["trainer.max_duration=9ba"], {}, "abc", "configurations"),
        (["configurations=[plain]"], {}, "abc", "configurations"),
        (["jobs=2"], {}, "abc", "jobs"),
        ([], {"base": "yamls/bert_imdb.yaml"}, "abc", "base"),
        ([], {}, "def", r"commit \(or uncommitted changes\)"),
    ],
)
def test_a_call_with_other_arguments_or_code_cannot_be_resumed(
    overrides: list[str], changes: dict[str, Any], commit: str, differs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_SPEEDUPS_COMMIT", "abc")
    runs_of(monkeypatch, stop_after=1)
    with pytest.raises(KeyboardInterrupt):
        run()
    before = ROWS.read_bytes()
    seen = runs_of(monkeypatch)
    monkeypatch.setenv("COMPOSER_SPEEDUPS_COMMIT", commit)
    with pytest.raises(SystemExit, match=rf"had different {differs}; .*remove resume=true"):
        run("resume=true", *overrides, **changes)
    assert seen == []
    assert ROWS.read_bytes() == before


def test_the_version_of_the_code_depends_on_uncommitted_changes_but_not_on_rows() -> None:
    def git(*arguments: str) -> str:
        named = ["-c", "user.name=n", "-c", "user.email=e"]
        done = subprocess.run(["git", *named, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    Path("benchmarks/results").mkdir(parents=True)
    for name in ("code.py", "benchmarks/results/rows"):
        Path(name).write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "all")
    commit = git("rev-parse", "HEAD")
    Path("benchmarks/results/rows").write_text("2\n")
    assert runner.code_version(Path()) == commit
    Path("code.py").write_text("2\n")
    changed = runner.code_version(Path())
    Path("code.py").write_text("3\n")
    assert commit != changed != runner.code_version(Path())
    assert str(changed).startswith(f"{commit}+")


def test_a_damaged_line_is_refused_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed runner leaves none, since the file is written whole; a full disk or a merge might."""
    ROWS.parent.mkdir(parents=True)
    ROWS.write_text('{"call": "2026-01-01"}\n{"call": "20')
    seen = runs_of(monkeypatch)
    with pytest.raises(SystemExit, match=r"table\.jsonl: line 2 is damaged; move the file away"):
        run("resume=true")
    assert seen == []
    assert ROWS.read_text().endswith('{"call": "20')


def test_a_table_runs_in_one_process_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ROWS.parent.mkdir(parents=True)
    running = Call(ROWS, [], {})
    runs_of(monkeypatch)
    with pytest.raises(SystemExit, match="another process is running this table"):
        run()
    running.end(finished=False)
    assert len(run()) == 3


@pytest.mark.exhaustive
def test_a_killed_runner_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL in the middle of a run: what was done is there, and only that is not run again."""

    def killed_in_the_third_run() -> None:
        ran: list[Job] = []

        def report(job: Job) -> dict[str, Any]:
            ran.append(job)
            if len(ran) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return REPORT

        replace_runs(pytest.MonkeyPatch(), report)
        runner.run_table(read_table(Path("table.yaml")), "table", Path("results"))

    table(matrix={})
    assert Fork(killed_in_the_third_run).wait().status == -signal.SIGKILL
    assert [(row["configuration"], row["repeats"]) for row in read_rows(ROWS)] == [("plain", 1), ("+ x", 1)]
    seen = runs_of(monkeypatch)
    rows = run("resume=true")
    assert seen == ["y=1", "a=1", "x=1", "y=1"]
    assert [json.loads(line) for line in ROWS.read_text().splitlines()] == rows
    assert [(row["configuration"], row["repeats"]) for row in rows] == [(name, 2) for name in ("plain", "+ x", "+ y")]
    assert len({row["call"] for row in rows}) == 1
