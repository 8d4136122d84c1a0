"""FSDP on two GPUs: losses of one process at the same global batch, what each holds, a checkpoint for one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.jobs import SHORT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
JOB = [
    *SHORT,
    "data.train_samples=64",
    "trainer.max_duration=1ep",
    "model.size=base",
    "algorithms={fused_optimizer: {}, sdpa_attention: {}}",
    "optimizer.lr=1e-4",
    "optimizer.max_grad_norm=0.5",
    "loggers.file.flush_interval=1",
]


def job(name: str, ranks: int, *overrides: str) -> dict[str, Any]:
    launcher = [sys.executable, "-m", "composer.cli.launcher", "-n", str(ranks), str(ROOT / "train.py")]
    command = [*launcher, "-f", str(ROOT / "yamls" / "quickstart.yaml"), *JOB, *overrides, f"run_name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, (done.stderr + done.stdout)[-5000:]
    return json.loads((Path("runs") / name / "report.json").read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("one"))
        return {"plain": job("one", 1), "whole": job("ddp", 2)}


@pytest.mark.parametrize(
    "way",
    [["shard=grad_op"], ["shard=full"], ["shard=full", "cpu_offload=true"], ["shard=full", "replicas=2"]],
    ids=lambda way: "-".join(way),
)
def test_shards_train_as_one_process_does_in_less_memory(way: list[str], one: dict[str, Any]) -> None:
    report = job("sharded", 2, *(f"trainer.fsdp.{key}" for key in way), "checkpoint.interval=1ep")
    for metric, value in one["plain"]["metrics"].items():
        assert report["metrics"][metric] == pytest.approx(value, rel=2e-2, abs=2e-2), metric
    assert report["training"]["ranks"] == 2
    held, whole = report["memory"], one["whole"]["memory"]
    if "replicas=2" not in way:  # two copies on two GPUs are shared by none
        assert held["optimizer_gib"] < 0.6 * whole["optimizer_gib"]
    if way == ["shard=full"]:
        assert held["weights_gib"] < 0.6 * whole["weights_gib"]
    job(
        "again",
        1,
        f"checkpoint.load={next(Path('runs/sharded/checkpoints').glob('ep1*.pt'))}",
        "trainer.max_duration=2ep",
    )
