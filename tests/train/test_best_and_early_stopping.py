"""checkpoint.best and trainer.early_stopping: which weights a run exports and where it stops, also if it is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer_speedups.core.errors import ConfigError
from tests.conftest import ROOT
from tests.helpers.jobs import SHORT, run
from tests.helpers.ranks import on_ranks
from tests.train.kill_harness import Point, run_cases

# The learning rate is so high that the loss climbs and falls again. The largest loss is neither the first nor the last.
UNSTEADY = [
    *("trainer.eval_interval=2ba", "checkpoint.interval=2ba", "optimizer.lr=0.02", "scheduler.name=constant"),
    "model.dropout=0.1",
]
JOB = [*UNSTEADY, "trainer.max_duration=10ba"]
BEST = "checkpoint.best={metric: loss, mode: max}"


def exported(name: str) -> dict[str, torch.Tensor]:
    return load_file(f"runs/{name}/model/model.safetensors")


def evaluated(report: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in report["metrics"].items() if not name.startswith("train_")}


def assert_exports_the_best(*settings: str) -> dict[str, Any]:
    """Check that a run exports the weights and metrics of a run that ended after the best evaluation; its report."""
    whole = run(*JOB, *settings, BEST, "run_name=whole")
    best = whole["best"]["batch"]
    assert 2 < best < 10, "the settings above should lead to another course of the loss"
    short = run(*JOB, *settings, f"trainer.max_duration={best}ba", "run_name=short")
    torch.testing.assert_close(exported("whole"), exported("short"), rtol=0, atol=0)
    assert evaluated(whole) == evaluated(short)
    assert whole["best"]["value"] == short["metrics"]["loss"] > whole["best"]["last_value"]
    assert (short["best"], short["early_stopping"]) == ({}, {})
    return whole


def test_the_weights_of_the_best_evaluation_are_exported(capsys: pytest.CaptureFixture[str]) -> None:
    whole = assert_exports_the_best("trainer.microbatch_size=4", "baseline={batches: 10}")
    line = f"{whole['best']['batch']}  batches trained; loss was {whole['best']['value']:.4g}"
    assert [ln.split()[0] for ln in capsys.readouterr().out.splitlines() if line in ln] == ["best"]


@pytest.mark.exhaustive
def test_the_adapters_of_the_best_evaluation_are_exported() -> None:
    assert_exports_the_best("algorithms.lora={}")
    adapters = [load_file(f"runs/{name}/adapter/adapter_model.safetensors") for name in ("whole", "short")]
    torch.testing.assert_close(*adapters, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [(), ("trainer.fsdp={}",)], ids=["ddp", "fsdp"])
def test_two_ranks_export_the_weights_of_the_best_evaluation(settings: tuple[str, ...]) -> None:
    first, second = on_ranks(lambda: assert_exports_the_best(*settings)["best"])
    assert first == second


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_is_killed_stops_early_and_exports_like_an_uninterrupted_one(tmp_path: Path) -> None:
    """The first kill comes after an evaluation and before its checkpoint, the second after training was stopped."""
    arguments = ["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, *UNSTEADY, "trainer.max_duration=20ba", BEST]
    arguments += ["trainer.early_stopping={metric: loss, patience: 6ba}"]
    kills: list[Point] = [{"at": "eval", "count": 3}, {"at": "report", "count": 1}]
    cases = [
        {"name": "whole", "arguments": [*arguments, "run_name=whole"]},
        {"name": "killed", "arguments": [*arguments, "run_name=killed"], "points": kills},
    ]
    assert run_cases(tmp_path, cases) == {"whole": [0], "killed": [-9, -9, 0]}
    runs = tmp_path / "runs"
    whole, killed = (json.loads((runs / name / "report.json").read_text()) for name in ("whole", "killed"))
    stopped = whole["early_stopping"]
    assert stopped["stopped"]
    assert whole["training"]["batches"] == stopped["best_batch"] + 8 < 20
    for section in ("training", "metrics", "best", "early_stopping"):
        assert killed[section] == whole[section], section
    weights = (load_file(runs / name / "model" / "model.safetensors") for name in ("whole", "killed"))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert [entry["batch"] for entry in killed["resumed"]] == [4, stopped["best_batch"] + 8]


@pytest.mark.parametrize("section", ["checkpoint.best", "trainer.early_stopping"])
def test_a_metric_that_the_task_does_not_have_is_refused_before_training(section: str) -> None:
    with pytest.raises(ConfigError, match=f"^{section}.metric: 'acuracy' is not a .*; did you mean 'accuracy'"):
        run(*JOB, f"{section}.metric=acuracy", *(["trainer.early_stopping.patience=2ba"] if "early" in section else []))
    assert not Path("runs/quickstart").exists(), "a run that never started leaves no folder"
