"""Every task with the fast set: the last loss equals that of plain bf16, and two GPUs reach the loss of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_fsdp_gpu import launched
from tests.helpers.jobs import run
from tests.helpers.support import TASKS

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("task", TASKS)]
PLAIN = ["algorithms={mixed_precision: {}, sdpa_attention: {}, fused_optimizer: {}}"]
FAST = [
    "algorithms={mixed_precision: {}, unpadding: {}, fused_layers: {}, cuda_graphs: {}, early_loss: {}, "
    "fused_optimizer: {}}",
    "algorithms.sdpa_attention=null",  # set in quickstart.yaml
]
JOB = ["data.train_samples=96", "trainer.max_duration=12ba", "optimizer.lr=1e-4"]


@pytest.mark.supports("fast set")
def test_the_fast_set_learns_what_plain_bf16_learns(task: str) -> None:
    kept = ["data.padding=max_length", f"model.task={task}"]  # one shape, so that graphs are replayed from the start
    plain = run(*JOB, *kept, *PLAIN, "run_name=plain")
    fast = run(*JOB, *kept, *FAST, "run_name=fast")
    assert all(entry["engaged"] for entry in fast["algorithms"].values()), fast["algorithms"]
    assert fast["algorithms"]["cuda_graphs"]["evidence"]["replays"] > 0
    assert fast["algorithms"]["early_loss"]["evidence"]["losses_read"] == 12
    # In both runs, mlm draws its masks from the same random numbers.
    assert fast["metrics"]["train_loss"] == pytest.approx(plain["metrics"]["train_loss"], rel=0.05, abs=0.02)
    assert set(fast["metrics"]) == set(plain["metrics"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_reach_the_loss_of_one(task: str) -> None:
    settings = [*JOB, f"model.task={task}", *FAST]
    two, one = launched(Path.cwd(), 2, *settings), run(*settings)
    assert two["training"]["ranks"] == 2
    assert all(entry["engaged"] for entry in two["algorithms"].values()), two["algorithms"]
    rel = 0.3 if task == "mlm" else 0.05  # each rank draws its own masks
    assert two["metrics"]["train_loss"] == pytest.approx(one["metrics"]["train_loss"], rel=rel, abs=0.02)
