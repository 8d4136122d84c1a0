"""Loggers by name in YAML: the histories are read back from the files they left."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import run

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
]


@pytest.fixture
def wandb_run(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """History and config of an offline run, from its own file."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run("trainer.max_duration=6ba", "loggers.wandb={mode: offline, tags: [a]}", "algorithms.torch_compile=null")
    import wandb
    from wandb.proto import wandb_internal_pb2 as pb
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()  # the process that writes the file has then ended
    (file,) = Path("runs/quickstart/wandb").glob("offline-run-*/run-*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    history: dict[str, list[Any]] = defaultdict(list)
    config: dict[str, Any] = {}
    while (data := store.scan_data()) is not None:
        record = pb.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        for item in record.history.item:
            history[item.key or "/".join(item.nested_key)].append(json.loads(item.value_json))
        for item in [*record.config.update, *record.run.config.update]:
            config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    store.close()
    return history, config


def test_wandb_works_offline_with_no_account(wandb_run: tuple[dict[str, list[Any]], dict[str, Any]]) -> None:
    history, config = wandb_run
    for name in LOGGED:
        assert history[name], f"{name} was not logged"
    assert all(value > 0 for value in history["throughput/samples_per_sec"])
    assert len(history["throughput/samples_per_sec"]) == 3, "from batch 4 of 6 on"
    assert config["data"]["train_samples"] == 48
    assert config["techniques/fused_optimizer/engaged"] is True


def test_tensorboard_and_file_leave_their_histories() -> None:
    run("trainer.max_duration=6ba", "loggers.tensorboard={}", "loggers.file={}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(Path("runs/quickstart/tensorboard").rglob("events*")).parent))
    events.Reload()
    scalars = events.Tags()["scalars"]
    assert set(LOGGED) <= set(scalars), set(LOGGED) - set(scalars)
    assert len(events.Scalars("throughput/samples_per_sec")) == 3
    text = Path("runs/quickstart/log-rank0.txt").read_text()
    assert "throughput/samples_per_sec" in text
