"""Your own Composer Trainer on two GPUs, with NCCL only: recommended() trains as on one GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_speedups.core.processes import python_module_command
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


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
