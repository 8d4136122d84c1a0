"""RunSummary: one value per measurement, the label of the techniques, and the axes of wandb's charts."""

from __future__ import annotations

from typing import Any

import pytest
from composer.core import Callback, DataSpec
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups import FusedOptimizer, MemoryAnatomy, RunSummary, SDPAAttention, TF32Matmul, ThroughputMonitor
from composer_speedups.callbacks.run_summary import techniques_label
from tests.helpers.common import Batches, data_spec, make_trainer, plain_batches, tiny_bert
from tests.helpers.wandb_runs import WandbRun


def _logged(trainer: Any) -> dict[str, list[float]]:
    (logger,) = trainer.logger.destinations
    return {name: [float(value) for _, value in values] for name, values in logger.data.items()}


def _accuracy() -> Any:
    return [MulticlassAccuracy(num_classes=2, average="micro")]


def test_the_summary_covers_the_whole_steady_state() -> None:
    monitor, memory = ThroughputMonitor(window=1, warmup_batches=1), MemoryAnatomy()
    trainer = make_trainer(batches=plain_batches(8), callbacks=[monitor, memory, RunSummary()])
    trainer.fit()
    logged, measured = _logged(trainer), monitor.summary()
    for name in ("samples_per_sec", "tokens_per_sec", "warmup_seconds", "eval_seconds"):
        assert logged[f"summary/{name}"] == [measured[name]]
    assert logged["summary/samples_per_sec"] != logged["throughput/samples_per_sec"][-1:], "the last batch alone"
    assert logged["summary/peak_gib"] == [memory.summary()["peak_gib"]]
    assert logged["summary/train_loss"] == [pytest.approx(float(trainer.state.total_loss_dict["loss/train/total"]))]
    assert "summary/accuracy" not in logged, "nothing was evaluated"


def test_an_evaluation_after_fit_end_is_in_the_summary() -> None:
    """Four batches with an evaluation every three: the last evaluation runs after FIT_END."""
    model = HuggingFaceModel(tiny_bert(), use_logits=True, metrics=_accuracy())
    evaluation = DataSpec(
        DataLoader(Batches(plain_batches(2)), batch_size=None),
        split_batch=lambda b, n: [b],
        get_num_samples_in_batch=lambda b: len(b["labels"]),
    )
    trainer = make_trainer(model=model, eval_dataloader=evaluation, eval_interval="3ba", callbacks=[RunSummary()])
    trainer.fit()
    logged = _logged(trainer)
    assert len(logged["metrics/eval/MulticlassAccuracy"]) == 2
    assert logged["summary/accuracy"][-1] == logged["metrics/eval/MulticlassAccuracy"][-1]
    assert len(logged["summary/accuracy"]) == 2, "once at FIT_END and once after the following evaluation"


def test_a_later_fit_and_a_second_trainer_have_one_summary_each() -> None:
    """The evaluations within them are not its end. Weights & Biases draws one bar for a value that is logged once."""
    summary = RunSummary()
    for fits in (1, 2):
        model = HuggingFaceModel(tiny_bert(), use_logits=True, metrics=_accuracy())
        settings: dict[str, Any] = {"eval_dataloader": data_spec(plain_batches(1)), "eval_interval": "2ba"}
        trainer = make_trainer(model=model, callbacks=[summary], **settings)
        for _ in range(fits):
            trainer.fit(duration="4ba")
        trainer.close()
        logged = _logged(trainer)
        assert len(logged["metrics/eval/MulticlassAccuracy"]) == 2 * fits
        assert len(logged["summary/accuracy"]) == fits


@pytest.mark.parametrize("late", [ThroughputMonitor, MemoryAnatomy])
def test_run_summary_before_a_callback_that_it_reads_is_refused(late: type[Callback]) -> None:
    with pytest.raises(ValueError, match=f"callbacks: RunSummary must come after {late.__name__}; put it last"):
        make_trainer(callbacks=[RunSummary(), late()])


def test_the_label_lists_the_techniques_in_one_order() -> None:
    assert techniques_label(make_trainer().state) == "none"
    techniques = [FusedOptimizer(), SDPAAttention("math")]
    label = "sdpa_attention(backend=math) + fused_optimizer"
    assert techniques_label(make_trainer(techniques).state) == label
    assert techniques_label(make_trainer([*reversed(techniques)]).state) == label


def test_the_label_omits_techniques_that_did_not_engage() -> None:
    with pytest.warns(UserWarning, match="continuing without tf32_matmul"):
        trainer = make_trainer([TF32Matmul(on_unavailable="warn"), FusedOptimizer()], callbacks=[RunSummary()])
    trainer.fit()
    (logger,) = trainer.logger.destinations
    assert logger.hyperparameters["techniques"] == "fused_optimizer"  # type: ignore[attr-defined]


def test_wandb_can_group_and_compare_runs(wandb_run: WandbRun) -> None:
    assert wandb_run.config["techniques"] == "unpadding + fused_optimizer"
    assert set(wandb_run.config["algorithms"]) == {"unpadding", "fused_optimizer"}
    assert (wandb_run.group, wandb_run.tags) == ("configurations", ("a",))
    compared = ("samples_per_sec", "peak_gib", "warmup_seconds", "accuracy", "train_loss")
    for name in compared:
        assert wandb_run.history[f"summary/{name}"] == [wandb_run.summary[f"summary/{name}"]], "bar and column"
    assert wandb_run.summary["summary/accuracy"] == wandb_run.history["metrics/eval/MulticlassAccuracy"][-1]


def test_wandb_plots_speed_over_batches_and_metrics_over_samples(wandb_run: WandbRun) -> None:
    assert wandb_run.axes["throughput/samples_per_sec"] == "time/batch"
    assert wandb_run.axes["memory/peak_gib"] == "time/batch"
    for name in ("loss/train/total", "metrics/train/MulticlassAccuracy", "metrics/eval/MulticlassAccuracy"):
        assert wandb_run.axes[name] == "time/sample"
    assert len(wandb_run.rows) == 7
    for row in wandb_run.rows:
        assert (row["time/batch"], row["time/sample"]) == (row["_step"], 8 * row["_step"])
