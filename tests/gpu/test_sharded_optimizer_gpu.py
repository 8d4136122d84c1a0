"""AdamW's state split over two GPUs: the metrics of one process, half the state on each, and resuming on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_fsdp_gpu import job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SHARDED = ["algorithms.fused_optimizer=null", "algorithms.sharded_optimizer={}"]


@pytest.mark.parametrize("precision", [[], ["algorithms.mixed_precision={dtype: fp16}"]], ids=["fp32", "fp16"])
def test_two_gpus_train_like_ddp_with_half_of_the_state(precision: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("ddp", "sharded")]
    for folder in folders:
        folder.mkdir()
    plain = job(folders[0], 2, *precision)
    report = job(folders[1], 2, *SHARDED, *precision, "checkpoint.interval=1ep")
    tolerance = 2e-2 if precision else 1e-3
    for metric, value in plain["metrics"].items():
        assert report["metrics"][metric] == pytest.approx(value, rel=tolerance, abs=tolerance), metric
    assert report["memory"]["optimizer_gib"] < 0.6 * plain["memory"]["optimizer_gib"]
    (checkpoint,) = (folders[1] / "runs" / "job" / "checkpoints").glob("ep1*.pt")
    resume = [
        f"checkpoint.load={checkpoint}",
        "checkpoint.trust_checkpoint=true",
        "trainer.max_duration=2ep",
        "run_name=again",
        "runs_folder=again",
    ]
    job(folders[1], 1, *SHARDED, *precision, *resume)
