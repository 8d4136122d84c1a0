"""The table of supported tasks in docs/RELIABILITY.md says yes only if a test that is not skipped has shown it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.helpers.forks import Fork
from tests.helpers.support import MARKS, TASKS, WAYS, claims_of, read_record

SKIPS = {"skip", "skipif", "long", "xfail"}


class Collected:
    """A pytest plugin that keeps the marks and claims of collected tests marked ``supports`` or ``refuses``."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if claims := claims_of(item):
                marks = sorted({mark.name for mark in item.iter_markers()})
                self.tests[item.nodeid] = {"marks": marks, "claims": [list(claim) for claim in claims]}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Collect all test files with such marks; return the marks and claims of each test."""
    marked = [f"mark.{mark}(" for mark in MARKS]
    files = [str(p) for p in (ROOT / "tests").rglob("test_*.py") if any(mark in p.read_text() for mark in marked)]
    path = tmp_path_factory.mktemp("collected") / "tests.json"

    def collect() -> None:
        plugin = Collected()
        options = ["--collect-only", "-q", "-m", "", "--assert=plain", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        status = pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), *files], plugins=[plugin])
        path.write_text(json.dumps(plugin.tests))
        raise SystemExit(int(status))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        end = Fork(collect).wait()
    assert end.status == 0, end.stderr[-3000:]
    tests: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return tests


def test_the_record_matches_the_collected_tests(collected: dict[str, dict[str, Any]]) -> None:
    record = read_record()
    again = 'run: pytest -n 2 -m "supports or refuses" --record-support'
    for test, entry in record.items():
        assert test in collected, f"{test} is recorded but does not exist; {again}"
        assert entry["claims"] == collected[test]["claims"], f"the recorded claims of {test} are outdated; {again}"
        assert entry["on"] == ("GPU" if "gpu" in collected[test]["marks"] else "CPU")
    on_cpu = {test for test, entry in collected.items() if "gpu" not in entry["marks"]}
    assert on_cpu <= set(record), f"not recorded; {again}"


def test_no_marked_test_is_skipped_on_a_cpu(collected: dict[str, dict[str, Any]]) -> None:
    for test, entry in collected.items():
        if "gpu" not in entry["marks"]:
            assert not SKIPS & set(entry["marks"]), test


def test_every_task_has_a_test_for_every_way(collected: dict[str, dict[str, Any]]) -> None:
    claimed = {(task, way) for entry in collected.values() for task, way, _ in entry["claims"]}
    assert claimed == {(task, way) for task in TASKS for way in WAYS}
