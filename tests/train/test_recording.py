"""A report or plot that fails never costs the model; the run ends with exit status 1 and says what failed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from composer.loggers import TensorboardLogger
from matplotlib.figure import Figure
from safetensors.torch import load_file

from composer_speedups.core import files
from composer_speedups.core.errors import RunFailedError
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.report import Recording
from tests.helpers.jobs import run

JOB = ["trainer.max_duration=4ba", "loggers.tensorboard={}"]
FOLDER = Path("runs/quickstart")


def _disk_is_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_space(line: str, where: str) -> bool:
    return line == f"{where} (OSError: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)})"


def _run(*overrides: str) -> list[str]:
    """Train; the lines that say what failed."""
    with pytest.raises(RunFailedError) as raised:
        run(*JOB, *overrides)
    first, *failures = raised.value.lines
    assert first == "the run was trained to its end; the model is in runs/quickstart/model. What failed:"
    assert load_file(FOLDER / "model" / "model.safetensors")
    return failures


def test_a_report_that_cannot_be_written_is_written_by_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = files.publish

    def full(partial: Path, path: Path) -> None:
        if path.name == "report.json":
            _disk_is_full()
        publish(partial, path)

    again = ["run_name=quickstart", "checkpoint.interval=2ba", "plot=true"]
    with monkeypatch.context() as patch:
        patch.setattr(files, "publish", full)
        (line,) = _run(*again)
    assert _no_space(line, "report: failed")
    assert (FOLDER / "throughput.png").exists()
    report = run(*JOB, *again)
    assert report["training"]["batches"] == 4
    assert report["resumed"] == [{"batch": 4, "checkpoint": "ep0-ba4-rank0.pt"}]


def test_everything_that_failed_has_a_line_and_the_status_is_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("composer_speedups.train.model_card.write_model_card", _disk_is_full)
    monkeypatch.setattr(Figure, "savefig", _disk_is_full)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as exited, exit_codes():
        run(*JOB, "plot=true")
    assert exited.value.code == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("train.py: ")]
    assert lines[0].startswith("train.py: the run was trained to its end; the model is in ")
    assert [line.split(": ")[1] for line in lines[1:]] == ["model card", "plot"]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reports_what_failed_on_any_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording()
    with recording.of("plot"):
        raise OSError("gone")
    monkeypatch.setattr("composer.utils.dist.all_gather_object", lambda mine: [mine, ["report on rank 1: failed"]])
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: rank)
    if rank == 0:
        with pytest.raises(RunFailedError, match=r"plot: failed \(OSError: gone\)\nreport on rank 1: failed"):
            recording.check(None)
    else:
        recording.check(None)


def test_a_logger_that_fails_at_the_end_of_training_does_not_cost_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorboardLogger, "fit_end", _disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        run(*JOB)
    assert load_file(FOLDER / "model" / "model.safetensors")
