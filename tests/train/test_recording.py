"""What a run leaves: loggers, the report, the plot and the model card; one that fails never costs the model."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from composer.loggers import TensorboardLogger
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composer_speedups.core import files
from composer_speedups.core.errors import ConfigError, RunFailedError
from composer_speedups.train.model_card import model_card
from tests.helpers.jobs import run
from tests.helpers.wandb_runs import WandbRun

JOB = ["trainer.max_duration=4ba", "loggers.tensorboard={}"]
FOLDER = Path("runs/quickstart")
MESSAGE = (
    r"^the run was trained to its end, and the model is in runs/quickstart/model; its report, model card or plot "
    r"failed \(OSError: \[Errno 28\] No space left on device\)$"
)


def _disk_is_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_report_that_cannot_be_written_is_written_by_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = files.publish

    def full(partial: Path, path: Path) -> None:
        if path.name == "report.json":
            _disk_is_full()
        publish(partial, path)

    again = ["run_name=quickstart", "checkpoint.interval=2ba", "plot=true"]
    with monkeypatch.context() as patch:
        patch.setattr(files, "publish", full)
        with pytest.raises(RunFailedError, match=MESSAGE):
            run(*JOB, *again)
    assert load_file(FOLDER / "model" / "model.safetensors")
    report = run(*JOB, *again)
    assert report["training"]["batches"] == 4
    assert report["resumed"] == [{"batch": 4, "checkpoint": "ep0-ba4-rank0.pt"}]


def test_a_plot_that_fails_costs_neither_the_model_nor_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", _disk_is_full)
    with pytest.raises(RunFailedError, match=MESSAGE) as error:
        run(*JOB, "plot=true")
    assert error.value.status == 1
    assert load_file(FOLDER / "model" / "model.safetensors")
    assert (FOLDER / "report.json").exists()


def test_a_logger_that_fails_at_the_end_of_training_does_not_cost_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorboardLogger, "fit_end", _disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        run(*JOB)
    assert load_file(FOLDER / "model" / "model.safetensors")


BRIEF = ["trainer.max_duration=2ba", "trainer.eval_batches=1", "run_name=done"]


def card(report: dict[str, Any], **sections: dict[str, Any]) -> tuple[str, Any]:
    """The text and the metadata of the card for a report with other values in sections of its config."""
    config = {**report["config"], **{name: {**report["config"][name], **new} for name, new in sections.items()}}
    text = str(model_card({**report, "config": config}))
    return text, ModelCard(text).data


def test_an_exported_model_has_a_card_of_its_report() -> None:
    report = run(*BRIEF, "algorithms.unpadding={}", "algorithms.sdpa_attention=null")
    text = Path("runs/done/model/README.md").read_text()
    modes = {path.stat().st_mode for path in Path("runs/done/model").iterdir()}
    assert len(modes) == 1, "whoever may read the configuration may read the weights"
    _, data = card(report)
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-classification")
    assert (data.base_model, data.datasets) == (None, None)
    words = " ".join(text.split())
    assert "train_accuracy" in report["metrics"]
    assert "train_" not in text, "of a last batch, which may have two samples"
    for part in (
        f"| accuracy | {report['metrics']['accuracy']:.6g} |",
        "trained from random weights",
        "Generated samples (builtin), at most 48 tokens per text.",
        "2 batches of 8 samples (`2ba`), learning rate 0.001, seed 17.",
        *(f"| `{name}` | {next(iter(entry['evidence']))} " for name, entry in report["algorithms"].items()),
        *(f"| {name} | {report['environment'][name]} |" for name in ("torch", "composer", "transformers", "python")),
    ):
        assert part in words

    hub = {"source": "hub", "hub_name": "nyu-mll/glue", "hub_config": "mrpc", "eval_split": "validation"}
    text, data = card(report, data=hub, model={"init": "pretrained", "name": "google-bert/bert-base-uncased"})
    assert "dataset `nyu-mll/glue mrpc`, trained on `train`, validated on `validation`, at most" in text
    assert (data.base_model, data.datasets) == ("google-bert/bert-base-uncased", ["nyu-mll/glue"])

    own = {"init": "pretrained", "name": "minilm"}  # of a package, and no name of the hub
    text, data = card(report, data={**hub, "eval_split": None}, model=own)
    assert "trained on `train`, at most" in text
    assert data.base_model is None
    text, _ = card(report, data={**hub, "eval_fraction": 0.1})
    assert "trained on `train`, validated on 0.1 of these samples, at most" in text

    files = {"source": "files", "train_file": "/secret/of/mine/part-*.csv"}
    text, _ = card(report, data=files, model={"init": "pretrained", "name": "/secret/bert|x"})
    assert "secret" not in text
    assert "Files: part-*.csv, at most 48" in text
    assert "trained from `bert|x`" in text


SECTIONS = ("throughput/", "memory/", "loss/", "metrics/", "summary/", "startup/", "optimizer/")


def test_a_login_that_wandb_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuses(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`")

    monkeypatch.setattr(wandb, "init", refuses)
    with pytest.raises(ConfigError, match=r"^loggers\.wandb: .* \(No API key configured\.\); .*mode=offline$"):
        run(*BRIEF, "loggers.wandb={}")


def test_tensorboard_gets_time_and_loss_at_an_interval_and_with_other_values() -> None:
    run("trainer.max_duration=7ba", "loggers.tensorboard={}", "loggers.interval=4", "trainer.eval_interval=5ba")
    events = EventAccumulator(str(next(Path("runs/quickstart/tensorboard").rglob("events*")).parent))
    events.Reload()
    steps = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert {0, 4} <= set(steps["loss/train/total"]) < set(range(7))
    assert {5, 7} <= set(steps["metrics/eval/MulticlassAccuracy"]) <= set(steps["time/sample"]) < set(range(8))


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
