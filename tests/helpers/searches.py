"""Run searches of tune with trials that are forked from a process with all imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes
from composer_speedups.tune import candidates, trials
from composer_speedups.tune.__main__ import main
from tests.conftest import ROOT
from tests.helpers.forks import Fork
from tests.helpers.hangs import HANGS
from tests.helpers.jobs import SHORT

__all__ = ["search"]


def search(
    monkeypatch: pytest.MonkeyPatch, techniques: list[str], *overrides: str, first_in_process: bool = False
) -> tuple[dict[str, Any], int]:
    """Tune a shortened quickstart over some techniques only.

    Args:
        techniques: Techniques to try, besides the quickstart's own.
        overrides: Overrides of the config and of tune's settings.
        first_in_process: Run the first trial as a new process, as users do.

    Returns:
        The content of quickstart.tuned.json, and the number of trials.
    """
    in_process, trained = trials._run, list[str]()

    def forked(
        program: str, arguments: list[str], environment: dict[str, str], timeout: float
    ) -> tuple[int | None, str]:
        trained.append(arguments[-1])
        if first_in_process and len(trained) == 1:
            return in_process(program, arguments, environment, timeout)

        def job() -> None:
            with exit_codes():
                application.main(arguments)

        done = Fork(job, **environment).wait(timeout)
        return done.status, done.stderr

    monkeypatch.setattr(trials, "_run", forked)
    monkeypatch.setattr(candidates, "technique_names", lambda: techniques)
    given = ["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, "trainer.max_duration=400ba", "trainer.device=cpu"]
    main([*given, f"tune.budget_seconds={HANGS:.0f}", "tune.steps=8", *overrides])
    return json.loads(Path("quickstart.tuned.json").read_text()), len(trained)
