"""RunReport: the techniques' evidence in loggers, and one value per measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback
from composer.loggers import FileLogger, InMemoryLogger, LoggerDestination, WandBLogger
from composer.models import HuggingFaceModel
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups import FusedOptimizer, MemoryAnatomy, RunReport, SDPAAttention, TF32Matmul, ThroughputMonitor
from composer_speedups.callbacks.run_report import techniques_label
from composer_speedups.core.run import Run
from composer_speedups.core.technique import NOT_YET
from tests.helpers.common import data_spec, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.wandb_runs import WandbRun, read_wandb

STEPS = "techniques/fused_optimizer/steps"


class Counting(FusedOptimizer):
    """Its evidence after the first batch and at the end differ, as that of unpadding does."""

    def proof(self, run: Run, seen: Any) -> Mapping[str, Any]:
        return {**super().proof(run, seen), "steps": 1}

    def summary(self, run: Run) -> Mapping[str, Any]:
        return {"steps": run.state.timestamp.batch.value}


class Ineffective(Counting):
    def summary(self, run: Run) -> Mapping[str, Any]:
        raise self.no_effect("it stopped", "look for the reason")


def train_with(logger: LoggerDestination, technique: Any = None) -> dict[str, Any]:
    """Train four batches, and return the evidence of the end."""
    technique = technique or Counting()
    trained([technique], batches=plain_batches(4), callbacks=[RunReport()], loggers=[logger])
    return dict(technique.evidence)


def _wandb_logger() -> WandBLogger:
    return WandBLogger(project="p", init_kwargs={"mode": "offline", "dir": str(Path.cwd())})


def logged(trainer: Any) -> dict[str, list[float]]:
    (logger,) = trainer.logger.destinations
    return {name: [float(value) for _, value in values] for name, values in logger.data.items()}


def accuracy_model() -> HuggingFaceModel:
    metrics: Any = [MulticlassAccuracy(num_classes=2, average="micro")]
    return HuggingFaceModel(tiny_bert(), use_logits=True, metrics=metrics)


@pytest.mark.pins
def test_weights_and_biases_has_the_evidence_of_the_end() -> None:
    """In a Trainer of one's own with Composer's logger; fit() is called twice."""
    technique = Counting()
    given: dict[str, Any] = {"max_duration": "2ba", "callbacks": [RunReport()], "loggers": [_wandb_logger()]}
    trainer = make_trainer([technique], batches=plain_batches(5), **given)
    trainer.fit()
    assert technique.evidence["steps"] == 2
    trainer.fit(duration="3ba")
    trainer.close()
    config = read_wandb(Path()).config
    assert {key: config[f"techniques/fused_optimizer/{key}"] for key in technique.evidence} == technique.evidence
    assert config[STEPS] == 5
    assert config["techniques/fused_optimizer/engaged"] is True


def test_weights_and_biases_says_that_a_technique_had_no_effect() -> None:
    with pytest.warns(UserWarning, match="it stopped"):
        train_with(_wandb_logger(), Ineffective(on_unavailable="warn"))
    config = read_wandb(Path()).config
    assert config["techniques/fused_optimizer/engaged"] is False
    assert config["techniques"] == "none", "what dashboards group runs by"


class Late(Counting):
    """Its effect is seen in the second batch."""

    def proof(self, run: Run, seen: Any) -> Any:
        return super().proof(run, seen) if run.state.timestamp.batch == 2 else NOT_YET


@pytest.mark.parametrize("technique", [Counting, Late])
def test_other_loggers_keep_the_evidence_of_the_first_batch(technique: type[Counting]) -> None:
    """MLflow's parameters never change, for example."""
    train_with(FileLogger("log.txt"), technique())
    lines = [line for line in Path("log.txt").read_text().splitlines() if f": {STEPS}: " in line]
    assert [line.split()[-1] for line in lines] == ["1"]
    logger = InMemoryLogger()
    train_with(logger, technique())
    assert logger.hyperparameters[STEPS] == 1


def test_a_second_trainer_has_its_own_dtypes_and_no_evidence_of_the_first() -> None:
    report = RunReport()
    for dtype, techniques in ((torch.float32, [FusedOptimizer()]), (torch.bfloat16, [])):
        logger = InMemoryLogger()
        trained(techniques, model=tiny_bert().to(dtype), callbacks=[report], loggers=[logger])
        assert report.numerics["weights"] == str(dtype).removeprefix("torch.")
    assert not [key for key in logger.hyperparameters if key.startswith("techniques/")]


def test_the_values_cover_the_whole_steady_state() -> None:
    monitor, memory = ThroughputMonitor(window=1, warmup_batches=1), MemoryAnatomy()
    trainer = trained(batches=plain_batches(8), callbacks=[monitor, memory, RunReport()])
    values, measured = logged(trainer), monitor.summary()
    for name in ("samples_per_sec", "tokens_per_sec", "warmup_seconds", "eval_seconds"):
        assert values[f"summary/{name}"] == [measured[name]]
    assert values["summary/samples_per_sec"] != values["throughput/samples_per_sec"][-1:], "the last batch alone"
    assert values["summary/peak_gib"] == [memory.summary()["peak_gib"]]
    assert values["summary/train_loss"] == [pytest.approx(float(trainer.state.total_loss_dict["loss/train/total"]))]
    assert "summary/accuracy" not in values, "nothing was evaluated"


@pytest.mark.parametrize(("interval", "values"), [("2ba", 1), ("3ba", 2)])
def test_each_fit_and_each_trainer_has_one_value_and_one_more_if_composer_evaluates_after_its_end(
    interval: str, values: int
) -> None:
    """Weights & Biases draws one bar for a value that is logged once. A fit has four batches."""
    report = RunReport()
    for fits in (1, 2):
        settings: dict[str, Any] = {"eval_dataloader": data_spec(plain_batches(1)), "eval_interval": interval}
        trainer = make_trainer(model=accuracy_model(), callbacks=[report], **settings)
        for _ in range(fits if values == 1 else 1):
            trainer.fit(duration="4ba")
        trainer.close()
        shown = logged(trainer)
        assert len(shown["summary/accuracy"]) == (fits if values == 1 else values)
        assert shown["summary/accuracy"][-1] == shown["metrics/eval/MulticlassAccuracy"][-1]


@pytest.mark.parametrize("late", [ThroughputMonitor, MemoryAnatomy])
def test_a_report_before_a_callback_that_it_reads_is_refused(late: type[Callback]) -> None:
    with pytest.raises(ValueError, match=f"callbacks: RunReport must come after {late.__name__}; put it last"):
        make_trainer(callbacks=[RunReport(), late()])


def test_the_label_lists_the_engaged_techniques_in_one_order() -> None:
    assert techniques_label(make_trainer().state) == "none"
    techniques = [FusedOptimizer(), SDPAAttention("math")]
    label = "sdpa_attention(backend=math) + fused_optimizer"
    for order in (techniques, [*reversed(techniques)]):
        assert techniques_label(make_trainer(order).state) == label
    with pytest.warns(UserWarning, match="continuing without tf32_matmul"):
        trainer = make_trainer([TF32Matmul(on_unavailable="warn"), FusedOptimizer()])
    assert techniques_label(trainer.state) == "fused_optimizer"


def test_wandb_can_group_and_compare_runs(wandb_run: WandbRun) -> None:
    assert wandb_run.config["techniques"] == "unpadding + fused_optimizer"
    assert set(wandb_run.config["algorithms"]) == {"unpadding", "fused_optimizer"}
    assert (wandb_run.group, wandb_run.tags) == ("configurations", ("a",))
    compared = ("samples_per_sec", "peak_gib", "warmup_seconds", "accuracy", "train_loss")
    for name in compared:
        assert wandb_run.history[f"summary/{name}"] == [wandb_run.summary[f"summary/{name}"]], "bar and column"
    assert wandb_run.summary["summary/accuracy"] == wandb_run.history["metrics/eval/MulticlassAccuracy"][-1]
