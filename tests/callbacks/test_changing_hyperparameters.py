"""Evidence that changes during the run: every logger shows what held at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.loggers import FileLogger, InMemoryLogger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger

from composer_speedups import EngagementReport, RunSummary, Unpadding
from tests.helpers.common import awkward_batches, batch, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.wandb_runs import read_wandb

PADDING = "techniques/unpadding/padding_of_the_run"


def _train(logger: LoggerDestination, technique: Unpadding | None = None, **settings: Any) -> dict[str, Any]:
    """Train on batches with more and more padding, and return the evidence of the end."""
    technique = technique or Unpadding()
    callbacks = [EngagementReport(), RunSummary()]
    trainer = make_trainer([technique], batches=awkward_batches(), callbacks=callbacks, loggers=[logger], **settings)
    try:
        trainer.fit()
    finally:
        trainer.close()
    return dict(technique.evidence)


class _Withdrawn(Unpadding):
    """It takes effect in the first batch, and not in the whole run."""

    def summary(self, run: Any) -> Any:
        raise self.no_effect("it stopped", "look for the reason")


def _wandb_logger() -> WandBLogger:
    return WandBLogger(project="p", init_kwargs={"mode": "offline", "dir": str(Path.cwd())})


@pytest.mark.pins
def test_weights_and_biases_has_the_evidence_of_the_end() -> None:
    """In a Trainer of one's own with Composer's logger; fit() is called twice."""
    technique, batches = Unpadding(), [*awkward_batches(), *plain_batches(1)]
    trainer = make_trainer(
        [technique], batches=batches, max_duration="2ba", callbacks=[EngagementReport()], loggers=[_wandb_logger()]
    )
    trainer.fit()
    first = dict(technique.evidence)
    trainer.fit(duration="3ba")
    trainer.close()
    assert technique.evidence["padding_of_the_run"] != first["padding_of_the_run"], "it changed"
    config = read_wandb(Path()).config
    assert {key: config[f"techniques/unpadding/{key}"] for key in technique.evidence} == technique.evidence
    assert config["techniques/unpadding/engaged"] is True


def test_weights_and_biases_does_not_keep_a_technique_that_was_withdrawn() -> None:
    with pytest.warns(UserWarning, match="it stopped"):
        _train(_wandb_logger(), _Withdrawn(on_unavailable="warn"))
    config = read_wandb(Path()).config
    assert config["techniques/unpadding/engaged"] is False
    assert config["techniques"] == "none", "what dashboards group runs by"


def test_tensorboard_shows_the_last_values_as_text() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    evidence = _train(TensorboardLogger("events"))
    events = EventAccumulator(str(next(Path("events").rglob("events*")).parent))
    events.Reload()
    shown = events.Tensors(f"{PADDING}/text_summary")
    assert [event.step for event in shown] == [1, 5]
    assert shown[-1].tensor_proto.string_val == [str(evidence["padding_of_the_run"]).encode()]


def test_the_log_file_ends_with_the_last_values() -> None:
    evidence = _train(FileLogger("log.txt"))
    logged = [line.split()[-1] for line in Path("log.txt").read_text().splitlines() if f": {PADDING}: " in line]
    assert logged[-1] == f"{evidence['padding_of_the_run']:.4f}"


def test_loggers_in_memory_keep_the_last_values() -> None:
    logger = InMemoryLogger()
    evidence = _train(logger)
    assert logger.hyperparameters[PADDING] == evidence["padding_of_the_run"]


class _MLflow(MLFlowLogger):
    """MLflow's rule that parameters never change; the package itself is not installed."""

    synchronous = True

    def __init__(self) -> None:
        self.parameters: dict[str, str] = {}

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        for key, value in hyperparameters.items():
            if self.parameters.setdefault(key, str(value)) != str(value):
                raise ValueError(f"Changing param values is not allowed: {key}")

    def _ignore(self, *arguments: Any, **named: Any) -> None: ...

    init = after_load = log_metrics = post_close = batch_end = epoch_end = fit_end = eval_end = _ignore


@pytest.mark.parametrize("ranks_own_run", [True, False])
def test_mlflow_has_the_last_values_as_tags(ranks_own_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tags: dict[str, Any] = {}

    def set_tags(values: dict[str, Any], synchronous: bool) -> None:
        tags.update(values)

    run = object() if ranks_own_run else None
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: run, set_tags=set_tags))
    logger = _MLflow()
    evidence = _train(logger)
    assert tags.get(PADDING) == (evidence["padding_of_the_run"] if ranks_own_run else None)
    assert PADDING not in logger.parameters, "a parameter would keep the first batch's value"


def test_a_report_in_a_second_trainer_forgets_the_first() -> None:
    report = EngagementReport()
    for techniques in ([Unpadding()], []):
        logger = InMemoryLogger()
        trained(techniques, batches=[batch([3, 5])], callbacks=[report], loggers=[logger])
    assert not [key for key in logger.hyperparameters if key.startswith("techniques/")]


def test_a_report_in_a_second_trainer_has_its_dtypes() -> None:
    report = EngagementReport()
    for dtype in (torch.float32, torch.bfloat16):
        trained(model=tiny_bert().to(dtype), callbacks=[report])
        assert report.numerics["weights"] == str(dtype).removeprefix("torch.")
