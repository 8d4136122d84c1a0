"""One trial of tune: the run that it is cut down from, its report, and what is said of one that went wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_speedups.core.registry import technique_class
from composer_speedups.core.requirements import Context
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config
from composer_speedups.tune.results import Outcome
from composer_speedups.tune.trials import OriginalRun, outcome_of, outcome_of_failure, trial_config
from tests.conftest import ROOT
from tests.helpers.searches import search

CPU = Context(torch.device("cpu"))
QUICKSTART = str(ROOT / "yamls" / "quickstart.yaml")


def test_a_trial_is_the_original_run_shortened() -> None:
    config = load_config(QUICKSTART, ["checkpoint.interval=1ep", "loggers.file={}", "callbacks.throughput=null"])
    trial = trial_config(config, {"lora": {}}, 12, Path("folder"))
    assert trial.model == config.model
    assert trial.optimizer == config.optimizer
    assert trial.data.batch_size == trial.data.eval_batch_size == 32
    assert (trial.trainer.max_duration, trial.trainer.eval_batches) == ("12ba", 1)
    assert trial.algorithms == {"lora": {}}
    assert trial.checkpoint.interval is trial.loggers.file is None
    assert trial.callbacks.throughput is not None
    assert trial.export is trial.plot is False
    assert trial_config(config, {}, 12, Path("folder"), 64).data.batch_size == 64
    assert config.trainer.max_duration == "2ep"


def test_the_length_of_the_planned_run_is_counted_in_steps() -> None:
    run = OriginalRun(Config(), CPU)
    run.config.data.batch_size, run.batches_per_epoch = 40, 25
    for duration, steps in {"2ep": 50, "7ba": 7, "81sp": 3, "80sp": 2, "5500tok": 6}.items():
        run.config.trainer.max_duration = duration
        assert run.planned_steps(Outcome("ok", tokens_per_step=1000.0)) == steps


def test_times_of_techniques_are_the_same_shares_of_a_trial_as_of_the_planned_run() -> None:
    run = OriginalRun(Config(), CPU)
    run.batches_per_epoch = 25

    def start(planned: str, given: str) -> str:
        run.config.trainer.max_duration = planned
        settings = {"layers": "auto", "start": given, "interval": "5ba"}
        shares = run.with_shares({"layer_freezing": settings, "lora": {"rank": 4, "targets": ["1ep"]}})
        assert shares["lora"] == {"rank": 4, "targets": ["1ep"]}, "no times"
        technique_class("layer_freezing")(**shares["layer_freezing"])  # the settings are valid
        return shares["layer_freezing"]["start"]

    assert start("4ep", "1ep") == start("100ba", "25ba") == "0.250000dur"
    assert start("100ba", "4ep") == "1.000000dur"
    assert start("100ba", "101ba") == "101ba", "which is never reached in the planned run either"
    assert (start("4ep", "0ep"), start("4ep", "0.3dur"), start("9000tok", "1ep")) == ("0ep", "0.3dur", "1ep")


def test_a_trial_divides_batches_into_micro_batches_as_the_original_run() -> None:
    config = load_config(QUICKSTART, ["trainer.microbatch_tokens=512"])
    trainer = trial_config(config, {}, 12, Path("folder"), 64).trainer
    assert (trainer.microbatch_tokens, trainer.on_out_of_memory) == (512, "stop")


@pytest.mark.exhaustive
def test_layers_that_freeze_late_are_measured_in_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    late = ["algorithms.layer_freezing={layers: 1, start: 100ba}", "tune.allow=[recipe]"]
    searched, _ = search(monkeypatch, ["foreach_optimizer"], *late)
    original = searched["trials"][0]
    assert original["algorithms"]["layer_freezing"] == {"layers": 1, "start": "100ba"}, "of 400"
    froze = original["outcome"]["evidence"]["layer_freezing"]["froze_after_batches"]
    assert froze == {"embeddings and 1 block": 2}, "of the trial's 8 steps"


@pytest.mark.exhaustive
def test_a_trial_that_times_out_names_its_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeping.py").write_text("import time\n\ndef stuck():\n    time.sleep(6000)\n\nstuck()\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = OriginalRun(Config(), CPU, "sleeping")
    for seconds in (3, 30, 300):  # a busy machine may not get that far within the first of them
        outcome = run.measure({}, steps=1, timeout=seconds)
        assert outcome.status == "time"
        if "sleeping.py" in outcome.reason:
            break
    assert re.fullmatch(r"not done after \d+ s, at sleeping\.py:4 in stuck", outcome.reason)


def test_a_report_becomes_an_outcome() -> None:
    report: dict[str, Any] = {
        "throughput": {
            "steady_batches": 5, "other_batches": 3, "step_seconds": 0.2, "data_seconds": 0.05,
            "warmup_seconds": 2.0, "samples_per_sec": 40.0,
        },
        "startup": {"trainer_seconds": 1.5, "imports_seconds": 9.0},
        "memory": {"peak_gib": 1.25},
        "training": {"batches": 8, "tokens": 800},
        "algorithms": {
            "lora": {"engaged": True, "evidence": {"modules": 3}},
            "tf32_matmul": {"engaged": False, "evidence": {"unavailable": "no GPU"}},
        },
    }  # fmt: skip
    outcome = outcome_of(report, 20.0)
    assert (outcome.step_seconds, outcome.start_seconds, outcome.other_batches) == (0.25, 3.5, 3)
    assert (outcome.tokens_per_step, outcome.peak_gib, outcome.wall_seconds) == (100.0, 1.25, 20.0)
    assert outcome.unengaged == {"tf32_matmul": "no GPU"}
    report["throughput"]["steady_batches"] = 0
    assert "steady state" in outcome_of(report, 20.0).reason


@pytest.mark.parametrize(
    ("status", "output", "expected", "reason"),
    [
        (2, "Warning\ntrain.py: lora: no; add it\n", "refused", "lora: no; add it"),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n", "memory", "CUDA out of memory"),
        (-9, "", "memory", "status -9"),
        (1, "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", "memory", "cublasCreate"),
        (1, "Traceback\nKeyError: 'x'\n\n", "failed", "KeyError: 'x'"),
    ],
)
def test_a_failed_trial_has_a_one_line_reason(status: int, output: str, expected: str, reason: str) -> None:
    outcome = outcome_of_failure(status, output, 1.0)
    assert outcome.status == expected
    assert reason in outcome.reason
