"""Start-up from process start to the first step: timing, garbage collection, early GPU start."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from composer.utils.collect_env import get_cpu_model

from composer_speedups.train.report import summary_table
from composer_speedups.train.startup import prefetch_cpu_model, without_gc
from tests.conftest import ROOT
from tests.helpers.jobs import run


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
    with without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


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
