"""The table of supported tasks in docs/RELIABILITY.md is what marked tests claim.

@pytest.mark.supports("resume", task="embedding")  # or the test's parameter ``task``; ``tasks`` for several
@pytest.mark.refuses("predict", task="mlm")        # the test shows that it is refused in one line
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.helpers.forks import Fork
from tests.helpers.support import TASKS

MARKS = {"supports": "yes", "refuses": "refused"}
SKIPS = {"skip", "skipif", "long", "xfail"}


class Collected:
    """A pytest plugin that keeps task, way and cell of each mark ``supports`` and ``refuses`` of collected tests."""

    def __init__(self) -> None:
        self.claims: list[tuple[str, str, str]] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in (mark for kind in MARKS for mark in item.iter_markers(kind)):
                assert "gpu" in item.keywords or not SKIPS & {other.name for other in item.iter_markers()}, item.nodeid
                given = item.callspec.params.get("task") if hasattr(item, "callspec") else None
                tasks = mark.kwargs.get("tasks") or [mark.kwargs.get("task") or given]
                self.claims += [(str(task), way, MARKS[mark.name]) for task in tasks for way in mark.args]


def test_every_cell_of_the_table_has_a_test(tmp_path: Path) -> None:
    marked = [f"mark.{mark}(" for mark in MARKS]
    files = [str(p) for p in (ROOT / "tests").rglob("test_*.py") if any(mark in p.read_text() for mark in marked)]

    def collect() -> None:
        plugin = Collected()
        options = ["--collect-only", "-q", "-m", "", "--assert=plain", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        status = pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), *files], plugins=[plugin])
        Path("claims.json").write_text(json.dumps(plugin.claims))
        raise SystemExit(int(status))

    end = Fork(collect).wait()
    assert end.status == 0, end.stderr[-3000:]
    claims = {tuple(claim) for claim in json.loads(Path("claims.json").read_text())}
    lines = (ROOT / "docs" / "RELIABILITY.md").read_text().split("## What each task supports")[1].splitlines()
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|"))
    rows = {row[0].strip("`"): row[1:] for row in body if row[0].strip("`") in TASKS}
    assert rows.keys() == TASKS.keys()
    assert claims == {(task, way, cell) for task, row in rows.items() for way, cell in zip(head[1:], row, strict=True)}
