"""Loggers named in YAML, with their histories read back from their files."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.jobs import run
from tests.helpers.wandb_runs import WandbRun

LOGGED = [
    "throughput/samples_per_sec",
    "throughput/tokens_per_sec",
    "throughput/padding_fraction",
    "throughput/mfu",
    "throughput/warmup_seconds",
    "memory/peak_gib",
    "memory/weights_gib",
    "memory/gradients_gib",
    "memory/optimizer_gib",
    "memory/activations_gib",
    "loss/train/total",
    "metrics/eval/MulticlassAccuracy",
    "summary/samples_per_sec",
    "summary/accuracy",
    "summary/peak_gib",
]


def test_wandb_works_offline_without_an_account(wandb_run: WandbRun) -> None:
    history, config = wandb_run.history, wandb_run.config
    for name in LOGGED:
        assert history[name], f"{name} was not logged"
    assert all(value > 0 for value in history["throughput/samples_per_sec"])
    assert len(history["throughput/samples_per_sec"]) == 3, "from batch 4 of 6"
    assert config["data"]["train_samples"] == 48
    assert config["techniques/fused_optimizer/engaged"] is True


def test_tensorboard_and_file_loggers_write_their_histories() -> None:
    run("trainer.max_duration=6ba", "loggers.tensorboard={}", "loggers.file={}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(Path("runs/quickstart/tensorboard").rglob("events*")).parent))
    events.Reload()
    scalars = events.Tags()["scalars"]
    assert set(LOGGED) <= set(scalars), set(LOGGED) - set(scalars)
    assert len(events.Scalars("throughput/samples_per_sec")) == 3
    text = Path("runs/quickstart/log-rank0.txt").read_text()
    assert "throughput/samples_per_sec" in text
