"""Start-up from process start to the first step: timing, garbage collection, early GPU start."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.loggers import InMemoryLogger
from composer.utils.collect_env import get_cpu_model

from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.report import StartupTimes, summary_table
from composer_speedups.train.startup import StartupClock, open_gpu_early, prefetch_cpu_model, without_gc
from tests.conftest import ROOT
from tests.helpers.common import trained
from tests.helpers.jobs import run


@pytest.mark.pins
def test_the_startup_phases_add_up() -> None:
    times = iter([103.0, 104.0, 110.0, 111.5])
    clock = StartupClock(lambda: next(times), started=100.0)
    for phase in ("config", "imports", "imports"):
        clock.lap(phase)
    assert clock.summary() == {
        "interpreter_seconds": 3.0,
        "config_seconds": 1.0,
        "imports_seconds": 7.5,
        "to_first_step_seconds": 11.5,
    }


@pytest.mark.pins
def test_the_clock_stops_at_the_first_batch() -> None:
    times = iter([1.0, 5.0, 9.0])
    callback = StartupTimes(StartupClock(lambda: next(times), started=0.0))
    assert callback.summary() == {}
    memory = InMemoryLogger()
    trained(callbacks=[callback], loggers=[memory])
    assert callback.summary() == {"interpreter_seconds": 1.0, "first_step_seconds": 4.0, "to_first_step_seconds": 5.0}
    [(_, logged)] = memory.data["startup/to_first_step_seconds"]
    assert logged == 5.0


def test_the_report_contains_the_startup_phases() -> None:
    report = run("trainer.max_duration=2ba", "trainer.eval_batches=1")
    startup = report["startup"]
    phases = ("interpreter", "config", "imports", "device", "data", "model", "trainer", "first_step")
    assert set(startup) == {f"{phase}_seconds" for phase in phases} | {"to_first_step_seconds"}
    assert sum(startup[f"{phase}_seconds"] for phase in phases) == pytest.approx(startup["to_first_step_seconds"])
    assert 0 < startup["to_first_step_seconds"] < report["wall_seconds"]
    assert startup["first_step_seconds"] > 0
    assert "s to the end of the first step: " in summary_table(report, "runs/quickstart")


def test_garbage_collection_is_disabled_only_within_the_context() -> None:
    assert gc.isenabled()
    with without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled(), "it was disabled before"
    finally:
        gc.enable()


def test_objects_made_by_imports_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    with without_gc():
        pass
    assert gc.get_freeze_count() == before, "torch was already imported"
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with without_gc():
            sys.modules["torch"] = torch
            made: list[list[int]] = [[] for _ in range(100_000)]
        assert gc.get_freeze_count() > before + len(made)
    finally:
        gc.unfreeze()


def test_the_cpu_model_is_cached_early() -> None:
    get_cpu_model.cache_clear()
    prefetch_cpu_model().join(60)
    assert get_cpu_model.cache_info().currsize == 1


def test_no_thread_starts_early_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr("threading.Thread", forbidden)
    config = Config()
    config.trainer.device = "cpu"
    open_gpu_early(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    open_gpu_early(Config())


def test_a_gpu_that_cannot_be_opened_early_is_left_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fails(index: int) -> None:
        asked.append(index)
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr("threading.Thread", _AtOnce)
    monkeypatch.setenv("LOCAL_RANK", "3")
    open_gpu_early(Config())
    assert asked == [3]


class _AtOnce:
    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        self.target, self.args = target, args

    def start(self) -> None:
        self.target(*self.args)


def test_objects_are_frozen_when_the_program_ends() -> None:
    frozen = gc.get_freeze_count()
    try:
        with exit_codes():
            pass
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_a_second_run_tokenizes_nothing() -> None:
    """A tokenizer keeps the truncation of its last call, which must not change the cache's key."""
    made = []
    for _ in range(2):
        run("trainer.max_duration=1ba", "trainer.eval_batches=1")
        made.append(sorted(Path(".cache/composer_speedups/tokens").iterdir()))
    assert made[0] == made[1]
    assert len(made[0]) == 2


@pytest.mark.gpu
def test_a_gpu_is_opened_early() -> None:
    code = (
        "import sys, threading; sys.path.insert(0, sys.argv[1]);"
        "from composer_speedups.train.config.schema import Config;"
        "from composer_speedups.train.startup import open_gpu_early;"
        "import torch; assert not torch.cuda.is_initialized();"
        "open_gpu_early(Config()); [t.join(60) for t in threading.enumerate() if t.daemon];"
        "assert torch.cuda.is_initialized() and torch.cuda.memory_allocated() == 0"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True)
