"""Run searches of tune with trials that are forked from a process with all imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_speedups.sweep import sets, trials
from composer_speedups.sweep.processes import Ended, Job
from composer_speedups.sweep.tune import main
from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes
from tests.conftest import ROOT
from tests.helpers.forks import Fork
from tests.helpers.hangs import HANGS
from tests.helpers.jobs import SHORT


def search(monkeypatch: pytest.MonkeyPatch, techniques: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """Tune a shortened quickstart with sets by label, and return the content of quickstart.tuned.json."""

    class Forked:
        def __init__(self, job: Job) -> None:
            self._job = job

        def wait(self, timeout: float | None = None) -> Ended:
            def job() -> None:
                with exit_codes():
                    application.main(self._job.arguments)

            done = Fork(job, **self._job.environment).wait(timeout or HANGS)
            return Ended(done.status, done.stderr, 1.0)

    monkeypatch.setattr(trials, "Process", Forked)
    monkeypatch.setitem(sets.SETS, "cpu", {"rounding": techniques})
    given = ["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, "trainer.max_duration=400ba", "trainer.device=cpu"]
    main([*given, f"tune.budget_seconds={HANGS:.0f}", "tune.steps=8", *overrides])
    return json.loads(Path("quickstart.tuned.json").read_text())
