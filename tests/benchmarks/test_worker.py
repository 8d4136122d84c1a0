"""Processes of a table that import ahead of their turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from composer.utils import dist

from benchmarks import worker
from benchmarks.worker import Ahead
from composer_speedups.core.errors import ConfigError
from composer_speedups.sweep.processes import Ended, Job, run_all
from composer_speedups.train.config.schema import TrainerConfig
from composer_speedups.train.trainer import open_device
from tests.helpers.hangs import HANGS

# A worker that executes some code in place of its imports, and a program that says what happened before it ran.
WORKER = """
import sys
from pathlib import Path
from benchmarks import worker
name = sys.argv[3]
def import_all():
    print("imports", name)
    if name == "broken":
        sys.exit(3)
    Path(f"{name}.imported").touch()
worker.import_all = import_all
worker._main(*sys.argv[1:])
"""
PROGRAM = """
from pathlib import Path
def main(arguments):
    print("runs after", sorted(path.stem for path in Path().glob("*.imported")))
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    (tmp_path / "importing.py").write_text(WORKER)
    (tmp_path / "reporting.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker, "__name__", "importing")
    return [Job([name], Path(f"{name}.log"), program="reporting") for name in ("a", "broken", "c")]


def test_the_processes_of_a_group_import_before_any_of_them_runs(jobs: list[Job]) -> None:
    ended: list[Ended] = []
    run_all(jobs, 1, lambda job, how: ended.append(how), Ahead(jobs, 2))
    assert [how.status for how in ended] == [0, 3, 0]
    assert ended[0].output == "imports a\nruns after ['a']\n"
    assert ended[1].output == "imports broken\n"
    assert ended[2].output == "imports c\nruns after ['a', 'c']\n", "the next group"


def test_processes_whose_turn_does_not_come_are_killed(jobs: list[Job]) -> None:
    ahead = Ahead([jobs[0], jobs[2]], 2)
    first = ahead(jobs[0])
    assert first.wait(HANGS).output == "imports a\nruns after ['a', 'c']\n"
    (held,) = ahead._held
    ahead.close()
    assert held.popen.returncode == -9
    assert jobs[2].log.read_text() in ("", "imports c\n")


def test_more_ranks_than_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "get_local_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"trainer\.device: 2 ranks need one GPU each, and there are 1"):
        open_device(TrainerConfig())
