"""Two GPUs: FSDP, DDP, a sharded optimizer and your own Trainer train like one process, in less memory, and resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_speedups.core.processes import python_module_command
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS
from tests.helpers.jobs import SHORT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
JOB = [
    "data.train_samples=64",
    "trainer.max_duration=1ep",
    "model.size=base",
    "algorithms={fused_optimizer: {}, sdpa_attention: {}, early_loss: {}}",
    "optimizer.lr=1e-4",
    "optimizer.max_grad_norm=0.5",
    "loggers.file.flush_interval=1",
]


FSDP_SETTINGS = [["shard=grad_op"], ["shard=full"], ["shard=full", "replicas=2"]]


def launched(folder: Path, ranks: int, *overrides: str) -> dict[str, Any]:
    launcher = [sys.executable, "-m", "composer.cli.launcher", "-n", str(ranks), str(ROOT / "train.py")]
    command = [*launcher, "-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, "run_name=job", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS, cwd=folder)
    assert done.returncode == 0, (done.stderr + done.stdout)[-5000:]
    return json.loads((folder / "runs" / "job" / "report.json").read_text())


def job(folder: Path, ranks: int, *overrides: str) -> dict[str, Any]:
    return launched(folder, ranks, *JOB, *overrides)


def train_and_resume(folder: Path, fsdp: list[str], *overrides: str) -> dict[str, Any]:
    """Train on two ranks, resume from their checkpoint in one process, and return the report of the two ranks."""
    report = job(folder, 2, *(f"trainer.fsdp.{key}" for key in fsdp), *overrides, "checkpoint.interval=1ep")
    (checkpoint,) = (folder / "runs" / "job" / "checkpoints").glob("ep1*.pt")
    load = [f"checkpoint.load={checkpoint}", "checkpoint.trust_checkpoint=true", "trainer.max_duration=2ep"]
    job(folder, 1, *overrides, *load, "run_name=again", "runs_folder=again")
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The reports of all jobs, which run at the same time because their results do not depend on each other."""
    with ThreadPoolExecutor() as pool:
        found = {"one": pool.submit(job, tmp_path_factory.mktemp("one"), 1)}
        found["ddp"] = pool.submit(job, tmp_path_factory.mktemp("ddp"), 2)
        for settings in FSDP_SETTINGS:
            found["-".join(settings)] = pool.submit(train_and_resume, tmp_path_factory.mktemp("shards"), settings)
        yield found


def test_ddp_trains_like_one_process_and_reads_losses_early(reports: dict[str, Future[dict[str, Any]]]) -> None:
    one, ddp = reports["one"].result(), reports["ddp"].result()
    for metric, value in one["metrics"].items():
        assert ddp["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=1e-3), metric
    assert ddp["algorithms"]["early_loss"]["evidence"]["losses_read"] == ddp["training"]["batches"]


@pytest.mark.parametrize("settings", FSDP_SETTINGS, ids="-".join)
def test_shards_train_like_one_process_in_less_memory(
    settings: list[str], reports: dict[str, Future[dict[str, Any]]]
) -> None:
    report = reports["-".join(settings)].result()
    for metric, value in reports["one"].result()["metrics"].items():
        assert report["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=1e-3), metric
    assert report["training"]["ranks"] == 2
    held, whole = report["memory"], reports["ddp"].result()["memory"]
    if "replicas=2" not in settings:  # with two replicas on two GPUs, nothing is sharded
        assert held["optimizer_gib"] < 0.6 * whole["optimizer_gib"]
    if settings == ["shard=full"]:
        assert held["weights_gib"] < 0.6 * whole["weights_gib"]


SHARDED = ["algorithms.fused_optimizer=null", "algorithms.sharded_optimizer={}"]


@pytest.mark.parametrize("precision", [[], ["algorithms.mixed_precision={dtype: fp16}"]], ids=["fp32", "fp16"])
def test_two_gpus_train_like_ddp_with_half_of_the_state(precision: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("ddp", "sharded")]
    for folder in folders:
        folder.mkdir()
    plain = job(folders[0], 2, *precision)
    report = train_and_resume(folders[1], [], *SHARDED, *precision)
    tolerance = 2e-2 if precision else 1e-3
    for metric, value in plain["metrics"].items():
        assert report["metrics"][metric] == pytest.approx(value, rel=tolerance, abs=tolerance), metric
    assert report["memory"]["optimizer_gib"] < 0.6 * plain["memory"]["optimizer_gib"]


def example(folder: Path, ranks: int, *arguments: str) -> dict[str, Any]:
    """Train BERT-base for twelve batches of 32 samples (global), without dropout because its draws differ by rank."""
    launcher = ["composer.cli.launcher", "-n", str(ranks), str(ROOT / "examples/own_trainer.py")]
    job = ["--samples", "384", "--batch-size", str(32 // ranks), "--duration", "12ba", "--dropout", "0", "--lr", "2e-5"]
    command, environment = python_module_command(*launcher, *job, *arguments)  # the package may not be installed
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS, cwd=folder)
    assert done.returncode == 0, (done.stderr + done.stdout)[-5000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_recommended_trains_on_two_gpus_as_on_one(tmp_path: Path) -> None:
    one, two, plain = example(tmp_path, 1), example(tmp_path, 2), example(tmp_path, 2, "--plain")
    for found in (two, plain):
        assert found["ranks"] == 2
        assert all(technique["engaged"] for technique in found["techniques"].values()), found["techniques"]
        assert found["techniques"]["early_loss"]["losses_read"] == 12
        assert found["techniques"]["cuda_graphs"]["replays"] > 0
    assert two["loss"] == pytest.approx(one["loss"], abs=0.02), "the batches are the same, in 16 bits"
    assert two["ddp"]["overlapped_steps"] == 10
    assert two["ddp"]["gradients_read_by"] is None
    assert plain["ddp"] is None
