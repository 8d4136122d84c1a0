"""A logger, report or plot that fails never costs the model; the run ends with exit status 1 and says what failed."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composer.core import State
from composer.loggers import FileLogger, InMemoryLogger, TensorboardLogger
from matplotlib.figure import Figure
from safetensors.torch import load_file

from composer_speedups.callbacks.guarded_logger import GuardedLogger
from composer_speedups.core import files
from composer_speedups.core.errors import NotRecordedError
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.loggers import RunProgress
from composer_speedups.train.recording import Recording
from tests.helpers.common import make_trainer
from tests.helpers.jobs import run

JOB = ["trainer.max_duration=4ba", "loggers.tensorboard={}"]
FOLDER = Path("runs/quickstart")


def _fails(
    monkeypatch: pytest.MonkeyPatch, cls: type, method: str, when: Callable[..., bool] = lambda *_: True
) -> None:
    """Let a method of a class raise in the calls whose arguments meet a condition."""
    original = getattr(cls, method)

    def patched(self: Any, *arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, *arguments, **named)

    monkeypatch.setattr(cls, method, patched)


def _no_space(line: str, where: str) -> bool:
    return line == f"{where} (OSError: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)})"


def _run(*overrides: str) -> list[str]:
    """Train; the lines that say what failed."""
    with pytest.raises(NotRecordedError) as raised:
        run(*JOB, *overrides)
    first, *failures = raised.value.lines
    assert first == "the run was trained to its end; the model is in runs/quickstart/model. What failed:"
    assert load_file(FOLDER / "model" / "model.safetensors")
    return failures


@pytest.mark.parametrize(
    ("method", "when", "said"),
    [
        ("batch_end", lambda state, _: state.timestamp.batch == 2, "after batch 2"),
        ("log_metrics", lambda metrics, step: "loss/train/total" in metrics and step == 1, "after batch 1"),
        ("log_metrics", lambda metrics, step: "summary/loss" in metrics, "after batch 4"),
        ("log_hyperparameters", lambda values: "techniques" in values, "after batch 1"),
        ("eval_end", lambda *_: True, "after batch 4"),
        ("fit_end", lambda *_: True, "after batch 4"),
        ("close", lambda *_: True, "when it was closed"),
        ("post_close", lambda *_: True, "when it was closed"),
    ],
)
def test_a_logger_that_fails_is_switched_off(
    method: str, when: Any, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _fails(monkeypatch, TensorboardLogger, method, when)
    (line,) = _run("loggers.file={}")
    assert _no_space(line, f"loggers.tensorboard: failed {said}")
    assert f"{line}; the run continues without it" in capfd.readouterr().err.splitlines(), "as soon as it failed"
    log = (FOLDER / "log-rank0.txt").read_text()
    assert "[metric][batch=3]: loss/train/total" in log, "other loggers continue"
    assert "[metric][batch=4]: summary/loss" in log
    assert (FOLDER / "report.json").exists()
    assert (FOLDER / "throughput.png").exists() is False, "plot=false in the short job"


def test_a_failed_logger_does_not_change_training(monkeypatch: pytest.MonkeyPatch) -> None:
    run(*JOB, "run_name=whole")
    _fails(monkeypatch, TensorboardLogger, "batch_end")
    _run()
    whole, part = (load_file(f"runs/{name}/model/model.safetensors") for name in ("whole", "quickstart"))
    assert all(weight.equal(part[name]) for name, weight in whole.items())


def test_each_print_reaches_the_terminal_although_the_log_file_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file logger writes everything that is printed, the summary included."""
    _fails(monkeypatch, FileLogger, "write", lambda prefix, text: prefix == "[stdout]: " and "report.json" in text)
    (line,) = _run("loggers.file={}")
    assert _no_space(line, "loggers.file: failed after batch 4")
    assert "quickstart: runs/quickstart/report.json" in capsys.readouterr().out


def test_a_progress_bar_without_a_terminal_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, RunProgress, "batch_end")
    (line,) = _run("trainer.progress_bar=true")
    assert _no_space(line, "trainer.progress_bar: failed after batch 1")


@pytest.mark.pins
def test_weights_and_biases_failing_at_the_end_does_not_cost_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.sdk.wandb_config import Config

    _fails(monkeypatch, Config, "update", lambda values: "techniques/fused_optimizer/engaged" in values)
    (line,) = _run("loggers.wandb={mode: offline}")
    assert _no_space(line, "loggers.wandb: failed after batch 1")
    assert wandb.run is None, "it was finished all the same"
    wandb.teardown()


def test_a_plot_that_fails_costs_neither_the_model_nor_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, Figure, "savefig")
    (line,) = _run("plot=true")
    assert _no_space(line, "plot: failed")
    assert (FOLDER / "report.json").exists()


def test_a_report_that_cannot_be_written_is_written_by_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = files.publish

    def full(partial: Path, path: Path) -> None:
        if path.name == "report.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
    _fails(monkeypatch, TensorboardLogger, "fit_end")
    _fails(monkeypatch, Figure, "savefig")
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as exited, exit_codes():
        run(*JOB, "plot=true", "export=false")
    assert exited.value.code == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("train.py: ")]
    assert lines[0] == "train.py: the run was trained to its end. What failed:"
    assert [line.split(": ")[1] for line in lines[1:]] == ["loggers.tensorboard", "plot"]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reports_what_failed_on_any_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, recording = make_trainer(), Recording()
    with recording.of("plot"):
        raise OSError("gone")
    monkeypatch.setattr(
        "composer.utils.dist.all_gather_object", lambda mine: [mine, ["loggers.file on rank 1: failed"]]
    )
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: rank)
    if rank == 0:
        with pytest.raises(NotRecordedError, match=r"plot: failed \(OSError: gone\); loggers.file on rank 1: failed"):
            recording.check(trainer, None)
    else:
        recording.check(trainer, None)
    monkeypatch.undo()
    trainer.close()


def test_a_logger_that_cannot_start_stops_the_run_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, TensorboardLogger, "init")
    with pytest.raises(OSError, match="No space left"):
        run(*JOB)
    assert not (FOLDER / "model").exists()


class _Kept(GuardedLogger, InMemoryLogger):
    label = "in memory"


def test_a_dead_data_worker_is_no_failure_of_the_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's signal handler raises in whatever line runs when a worker dies."""
    logger = _Kept()

    def dies(self: Any, state: State, logger: Any) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    monkeypatch.setattr(InMemoryLogger, "batch_end", dies, raising=False)
    trainer = make_trainer(loggers=[logger])
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        trainer.fit()
    trainer.close()
    assert logger.failure is None


def test_a_guarded_logger_works_in_any_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = _Kept()
    with monkeypatch.context() as patch:
        _fails(patch, InMemoryLogger, "log_metrics", lambda metrics, step: step == 2)
        trainer = make_trainer(loggers=[logger])
        trainer.fit()
        trainer.close()
    assert trainer.state.timestamp.batch == 4
    assert logger.failure is not None
    assert _no_space(logger.failure, "in memory: failed after batch 2")
    assert {step.batch.value for values in logger.data.values() for step, _ in values} == {0, 1}, (
        "nothing after it failed"
    )
    trainer = make_trainer(loggers=[logger])
    assert logger.failure is None, "of an earlier Trainer"
    trainer.close()
