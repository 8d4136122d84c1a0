"""One trial of tune: its set of techniques, the run that it is cut down from, its report, and why one went wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_speedups.core.engaging import refuse_conflicts
from composer_speedups.core.registry import build_techniques, technique_class
from composer_speedups.core.run import Run
from composer_speedups.recommendation import RECOMMENDED
from composer_speedups.sweep.processes import Ended, own_line
from composer_speedups.sweep.sets import SETS, Changes, combined, forbidden, key_of
from composer_speedups.sweep.trials import OriginalRun, Trial, trial_config, trial_of
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import Config, TrainerConfig
from tests.conftest import ROOT

CPU = Run(torch.device("cpu"))


def test_a_trial_is_the_original_run_shortened() -> None:
    own = ["checkpoint.interval=1ep", "loggers.file={}", "callbacks.throughput=null", "on_unavailable=warn"]
    config = load_config(ROOT / "yamls" / "quickstart.yaml", [*own, "trainer.microbatch_tokens=512"])
    trial = trial_config(config, {"lora": {}}, 12, Path("folder"))
    assert (trial.model, trial.optimizer) == (config.model, config.optimizer)
    assert trial.data.batch_size == trial.data.eval_batch_size == 32
    assert (trial.trainer.max_duration, trial.trainer.eval_batches) == ("12ba", 1)
    assert (trial.trainer.microbatch_tokens, trial.trainer.on_out_of_memory) == (512, "stop")
    assert (trial.algorithms, trial.on_unavailable) == ({"lora": {}}, "stop")
    assert trial_config(config, config.algorithms, 12, Path("folder")).on_unavailable == "warn"
    assert trial.checkpoint.interval is trial.loggers.file is trial.baseline is None
    assert trial.callbacks.throughput is not None
    assert trial.export is trial.plot is False


def test_the_length_of_the_planned_run_is_counted_in_steps() -> None:
    run = OriginalRun(Config(), CPU)
    run.config.data.batch_size, run.batches_per_epoch = 40, 25
    for duration, steps in {"2ep": 50, "7ba": 7, "81sp": 3, "80sp": 2, "5500tok": 6}.items():
        run.config.trainer.max_duration = duration
        assert run.planned_steps(Trial("", tokens_per_step=1000.0)) == steps
    trial = Trial("", step_seconds=0.5, start_seconds=4.0, start_steps=3)
    assert [trial.planned_seconds(steps) for steps in (103, 2)] == [54.0, 4.0]
    assert Trial("", status="failed").planned_seconds(2) == float("inf")


def test_a_set_that_train_py_would_refuse_has_its_reason() -> None:
    config = Config()
    run = OriginalRun(config, CPU)
    assert "needs a CUDA GPU" in (run.refusal({"tf32_matmul": {}}) or "")
    assert "nothing packs them" in (run.refusal({"fused_layers": {}}) or "")
    assert run.refusal({"fused_layers": {}, "unpadding": {}}) is None
    config.trainer.precision = "amp_bf16"
    assert "both set the precision" in (run.refusal({"mixed_precision": {}}) or "")


def test_a_report_becomes_a_trial() -> None:
    report: dict[str, Any] = {
        "throughput": {
            "steady_batches": 5, "other_batches": 3, "step_seconds": 0.2, "data_seconds": 0.05,
            "warmup_seconds": 2.0, "samples_per_sec": 40.0,
        },
        "startup": {"trainer_seconds": 1.5, "imports_seconds": 9.0},
        "memory": {"peak_gib": 1.25},
        "training": {"batches": 8, "tokens": 800},
    }  # fmt: skip
    Path("report.json").write_text(json.dumps(report))
    trial = trial_of("x", {"lora": {}}, Ended(0, "", 20.0), Path())
    assert trial == Trial("x", {"lora": {}}, "ok", "", 0.25, 3.5, 3, 40.0, 1.25, 100.0)
    report["throughput"]["steady_batches"] = 0
    Path("report.json").write_text(json.dumps(report))
    assert "steady state" in trial_of("x", {}, Ended(0, "", 20.0), Path()).reason


@pytest.mark.parametrize(
    ("status", "output", "expected", "reason"),
    [
        (2, "Warning\ntrain.py: lora: no; add it\n", "refused", "lora: no; add it"),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n", "out of memory", "CUDA out of memory"),
        (-9, "", "out of memory", "status -9"),
        (1, "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", "out of memory", "CUBLAS"),
        (1, "Traceback\nKeyError: 'x'\n\n", "failed", "KeyError: 'x'"),
        (None, "Traceback", "time", "time limit"),
    ],
)
def test_a_failed_trial_has_a_one_line_reason(status: int | None, output: str, expected: str, reason: str) -> None:
    trial = trial_of("x", {}, Ended(status, output, 1.0), Path("none"))
    assert trial.status == expected
    assert reason in trial.reason


def test_the_reason_is_the_last_exception_rather_than_what_follows_it() -> None:
    crash = "begins\nFatal Python error: Bus error\n\nCurrent thread 0x2:\n\nExtension modules: a, b\n"
    assert own_line(crash) == "Fatal Python error: Bus error"
    assert own_line(f"train.py: why\n{crash}") == "why"
    traceback = '  File "a.py", line 1, in f\n    raise ValueError("x: y")\nValueError: bad\n'
    last = "\nDuring handling of the above exception\n\npkg.errors.CompilationError: at 262:30:\n    tl.dot(\n"
    advice = "\nSet VARIABLE=1 for the internal stack trace\n"
    assert own_line(traceback + advice) == "ValueError: bad"
    assert own_line(traceback + last + advice) == "pkg.errors.CompilationError: at 262:30:"
    assert own_line("the job failed\nan Error: seen\nended\n") == "ended"


EVERY = [
    pytest.param(device, changes, techniques, id=f"{device}: {label}")
    for device, by_changes in SETS.items()
    for changes, labelled in by_changes.items()
    for label, techniques in labelled.items()
]


@pytest.mark.parametrize(("device", "changes", "techniques"), EVERY)
def test_every_set_is_valid_and_changes_what_the_table_says(device: str, changes: Changes, techniques: Any) -> None:
    refuse_conflicts(build_techniques(techniques))
    kinds = {technique_class(name).effect_with(settings, device) for name, settings in techniques.items()}
    order = ("exact", "rounding", "lower_precision", "recipe")
    assert max(kinds, key=order.index) == changes
    assert sum(param.values[2] == techniques and param.values[0] == device for param in EVERY) == 1


def test_the_recipe_stays_and_the_sets_techniques_that_conflict_with_it_are_left_out() -> None:
    def whole(algorithms: Any, precision: Any = "fp32") -> dict[str, Any]:
        return combined(Config(algorithms=algorithms, trainer=TrainerConfig(precision=precision)), RECOMMENDED)

    assert whole({"torch_compile": {}, "sdpa_attention": {}}) == RECOMMENDED
    assert whole({"lora": {"rank": 2}}) == {"lora": {"rank": 2}, **RECOMMENDED}
    factored = {name: settings for name, settings in RECOMMENDED.items() if name != "fused_optimizer"}
    assert whole({"adafactor": {}, "fused_optimizer": {}}) == {"adafactor": {}, **factored}
    assert "fused_layers" not in whole({"sparse_upcycling": {}})
    assert "mixed_precision" not in whole({}, "amp_bf16")


def test_sets_are_equal_whatever_their_order_and_defaults() -> None:
    one: Any = {"torch_compile": {"scope": "model"}, "sdpa_attention": {}}
    assert key_of(one) == key_of({"sdpa_attention": {}, "torch_compile": {}})
    assert key_of(one) != key_of({"torch_compile": {"scope": "blocks"}, "sdpa_attention": {}})


def test_only_permitted_changes_are_tried() -> None:
    assert forbidden("rounding", ()) is forbidden("lower_precision", ("lower_precision",)) is None
    assert "tune.allow=[lower_precision] allows it" in (forbidden("lower_precision", ()) or "")
    assert "tune.allow=[lower_precision, recipe]" in (forbidden("recipe", ("lower_precision",)) or "")
