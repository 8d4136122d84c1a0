"""FSDP on two GPUs: the same metrics as one process, less memory per GPU, and checkpoints that one process can load."""

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

from tests.conftest import ROOT
from tests.helpers.hangs import HANGS
from tests.helpers.jobs import SHORT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
JOB = [
    *SHORT,
    "data.train_samples=64",
    "trainer.max_duration=1ep",
    "model.size=base",
    "algorithms={fused_optimizer: {}, sdpa_attention: {}, early_loss: {}}",
    "optimizer.lr=1e-4",
    "optimizer.max_grad_norm=0.5",
    "loggers.file.flush_interval=1",
]


FSDP_SETTINGS = [["shard=grad_op"], ["shard=full"], ["shard=full", "cpu_offload=true"], ["shard=full", "replicas=2"]]


def job(folder: Path, ranks: int, *overrides: str) -> dict[str, Any]:
    launcher = [sys.executable, "-m", "composer.cli.launcher", "-n", str(ranks), str(ROOT / "train.py")]
    command = [*launcher, "-f", str(ROOT / "yamls" / "quickstart.yaml"), *JOB, "run_name=job", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS, cwd=folder)
    assert done.returncode == 0, (done.stderr + done.stdout)[-5000:]
    return json.loads((folder / "runs" / "job" / "report.json").read_text())


def train_and_resume(folder: Path, settings: list[str]) -> dict[str, Any]:
    """Train on two ranks, resume from their checkpoint in one process, and return the report of the two ranks."""
    report = job(folder, 2, *(f"trainer.fsdp.{key}" for key in settings), "checkpoint.interval=1ep")
    (checkpoint,) = (folder / "runs" / "job" / "checkpoints").glob("ep1*.pt")
    load = [f"checkpoint.load={checkpoint}", "checkpoint.trust_checkpoint=true", "trainer.max_duration=2ep"]
    job(folder, 1, *load, "run_name=again", "runs_folder=again")
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
