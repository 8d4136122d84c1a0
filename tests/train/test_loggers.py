"""Loggers, named in YAML and in a Trainer of one's own, with their histories read back from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from composer.loggers import FileLogger, TensorboardLogger, WandBLogger
from composer.models import HuggingFaceModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups import LossMonitor, MemoryAnatomy, RunReport, ThroughputMonitor, recommended
from composer_speedups.core.engaging import techniques_of
from tests.helpers.common import awkward_batches, data_spec, make_trainer, plain_batches, tiny_bert
from tests.helpers.jobs import run
from tests.helpers.wandb_runs import WandbRun, missing_in, read_wandb

SECTIONS = ("throughput/", "memory/", "loss/", "metrics/", "summary/", "startup/", "optimizer/")


def test_tensorboard_and_the_file_get_every_metric_that_wandb_gets(wandb_run: WandbRun) -> None:
    """wandb works offline, without an account."""
    run("trainer.max_duration=6ba", "loggers.tensorboard={}", "loggers.file={}")
    events = EventAccumulator(str(next(Path("runs/quickstart/tensorboard").rglob("events*")).parent))
    events.Reload()
    text = Path("runs/quickstart/log-rank0.txt").read_text()
    metrics = {name for name in wandb_run.history if name.startswith(SECTIONS)}
    assert {name.split("/")[0] + "/" for name in metrics} == set(SECTIONS)
    assert metrics <= set(events.Tags()["scalars"])
    assert [name for name in metrics if name not in text] == []
    rates = [event.value for event in events.Scalars("throughput/samples_per_sec")]
    assert len(rates) == len(wandb_run.history["throughput/samples_per_sec"]) == 2, "after batches 4 and 6"
    assert min(rates) > 0


@pytest.mark.exhaustive
def test_wandbs_own_variable_sets_the_mode_that_the_config_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    wandb.teardown()  # of an earlier test
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("trainer.max_duration=4ba", "loggers.wandb={}")
    assert "loss/train/total" in read_wandb(Path("runs/quickstart")).history


@pytest.mark.filterwarnings("ignore:continuing without:UserWarning")
@pytest.mark.pins
def test_the_recommended_set_in_a_trainer_of_ones_own_logs_to_all_of_them() -> None:
    """What this machine lacks is left out. A dashboard finds all but what only train.py measures or names so."""
    model: Any = tiny_bert()
    metrics: Any = [MulticlassAccuracy(num_classes=2, average="micro")]
    batches = [*awkward_batches(), *plain_batches(3)]
    trainer = make_trainer(
        recommended(on_unavailable="warn"),
        model=HuggingFaceModel(model, use_logits=True, metrics=metrics),
        batches=batches,
        eval_dataloader=data_spec(plain_batches(2)),
        callbacks=[ThroughputMonitor(window=2), MemoryAnatomy(), LossMonitor(), RunReport()],
        loggers=[
            WandBLogger(init_kwargs={"mode": "offline", "dir": str(Path.cwd())}),
            TensorboardLogger("events"),
            FileLogger("log.txt"),
        ],
        run_name="own",
    )
    trainer.fit()
    evidence = {
        f"techniques/{technique.name}/{key}": value
        for technique in techniques_of(trainer.state.algorithms)
        for key, value in {"engaged": technique.engaged, **technique.evidence}.items()
    }
    trainer.close()
    seen = read_wandb(Path())
    assert {key: seen.config[key] for key in evidence} == evidence
    assert evidence["techniques/unpadding/engaged"] is True
    assert "unpadding" in seen.config["techniques"]
    absent = missing_in(seen, "classification")
    assert not {key for key in absent if not key.startswith(("startup/", "metrics/eval/"))}
    assert "metrics/eval/MulticlassAccuracy" not in absent
    events = EventAccumulator(str(next(Path("events").rglob("events*")).parent))
    events.Reload()
    assert "summary/samples_per_sec" in events.Tags()["scalars"]
    assert "summary/samples_per_sec" in Path("log.txt").read_text()
