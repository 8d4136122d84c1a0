"""train.py in this process: report, saved config, run folders, export, resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from composer_speedups.core.errors import ConfigError
from composer_speedups.distributed.ddp import OverlappedDDP
from composer_speedups.train import application, trainer
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import OptimizerConfig
from composer_speedups.train.report import summary_table
from composer_speedups.train.trainer import build_optimizer, open_device
from tests.helpers.common import tiny_bert
from tests.helpers.jobs import run


def test_gradients_are_summed_on_several_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [])
    for ranks in (1, 2):
        monkeypatch.setattr(trainer.dist, "get_world_size", lambda ranks=ranks: ranks)
        sums = [callback for callback in trainer._callbacks(config, None) if isinstance(callback, OverlappedDDP)]
        assert len(sums) == ranks - 1


@pytest.mark.pins
def test_the_report_has_the_measurements_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    techniques = "algorithms.torch_compile={backend: aot_eager, scope: blocks}"
    report = run("trainer.max_duration=12ba", techniques)
    throughput, memory, metrics = report["throughput"], report["memory"], report["metrics"]
    for name in ("samples_per_sec", "tokens_per_sec", "padding_fraction", "step_seconds", "warmup_seconds"):
        assert throughput[name] > 0, name
    assert throughput["tokens_per_sec"] > throughput["samples_per_sec"]
    assert 0 < throughput["padding_fraction"] < 1
    assert throughput["eval_seconds"] > 0
    assert all(memory[f"{part}_gib"] > 0 for part in ("peak", "weights", "gradients", "optimizer"))
    assert {"train_loss", "train_accuracy", "accuracy", "loss"} <= set(metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert {name: entry["engaged"] for name, entry in report["algorithms"].items()} == {
        "sdpa_attention": True,
        "fused_optimizer": True,
        "torch_compile": True,
    }
    assert "_fused_adamw_" in report["algorithms"]["fused_optimizer"]["evidence"]["operators_in_one_step"]
    numerics = {"weights": "float32", "precision": "fp32", "matmul": "fp32", "float32_matmul_precision": "highest"}
    assert report["numerics"] == numerics
    environment = report["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["composer"] == "0.32.1"
    assert {"gpu", "transformers", "commit", "cpu", "driver"} <= set(environment)
    assert not environment["cpu"].startswith("model name")
    assert not Path("runs/quickstart/throughput.png").exists(), "plot=false"
    assert report["training"]["batches"] == 12
    assert report["wall_seconds"] > 0
    assert report["config"]["data"]["train_samples"] == 48
    startup = report["startup"]
    phases = ("interpreter", "config", "imports", "device", "data", "model", "trainer", "first_step")
    assert set(startup) == {f"{phase}_seconds" for phase in phases} | {"to_first_step_seconds"}
    assert sum(startup[f"{phase}_seconds"] for phase in phases) == pytest.approx(startup["to_first_step_seconds"])
    assert 0 < startup["first_step_seconds"] < startup["to_first_step_seconds"] < report["wall_seconds"]
    printed = capsys.readouterr().out
    assert "fused_optimizer    engaged: " in printed
    assert "s to the end of the first step: " in printed


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three epochs, six batches each, with checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    saving = ["checkpoint.interval=4ba", "checkpoint.keep=-1", "plot=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("trainer.max_duration=3ep", "model.dropout=0.1", *saving, "algorithms.mixed_precision={allow_cpu: true}")
    return folder / "runs" / "quickstart"


def saved_state(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "ep3-ba18-rank0.pt", weights_only=False)["state"]


@pytest.mark.pins
def test_the_export_loads_without_this_package_and_gives_the_same_logits(finished: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(finished / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    weights = load_file(finished / "model" / "model.safetensors")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert json.loads((finished / "report.json").read_text())["algorithms"]["mixed_precision"]["engaged"]
    assert {w.dtype for w in weights.values()} == {torch.float32}
    trained = saved_state(finished)["model"]
    torch.testing.assert_close(weights, {n: trained[f"model.{n}"] for n in weights}, rtol=0, atol=0)
    inputs = tokenizer("the plot was not dull", return_tensors="pt")
    assert model(**inputs).logits.shape == (1, 2)


@pytest.mark.pins
def test_the_saved_config_and_a_checkpoint_reproduce_the_run(finished: Path) -> None:
    """Its plot, too, contains all losses and evaluations."""
    load = f"checkpoint.load={finished}/checkpoints/ep1-ba8-rank0.pt"
    application.main(["-f", str(finished / "config.yaml"), load, "checkpoint.trust_checkpoint=true"])
    resumed = Path("runs/quickstart")
    before, after = (json.loads((folder / "report.json").read_text()) for folder in (finished, resumed))
    assert (after["metrics"], after["training"]["batches"]) == (before["metrics"], 18)
    for key in ("load", "trust_checkpoint"):
        assert after["config"]["checkpoint"].pop(key) != before["config"]["checkpoint"].pop(key)
    assert after["config"] == before["config"]
    histories, losses = (
        [saved_state(folder)["callbacks"][name] for folder in (resumed, finished)]
        for name in ("RunHistory", "LossMonitor")
    )
    assert losses[0] == losses[1]
    assert histories[0]["evaluations"] == histories[1]["evaluations"]
    shown = after["evaluations"]
    assert [e["batch"] for e in shown] == list(histories[0]["evaluations"])
    assert [e["seconds"] for e in shown] == sorted(e["seconds"] for e in shown)
    assert shown[-1]["seconds"] > histories[1]["wall_seconds"], "the time of earlier processes counts"
    assert {name: shown[-1][name] for name in ("accuracy", "loss")}.items() <= after["metrics"].items()
    assert list(losses[0]["losses"]) == list(range(1, 19))
    assert {"accuracy", "loss"} <= set(histories[0]["evaluations"][6])
    height, width = imread(resumed / "throughput.png").shape[:2]
    assert height > 0.7 * width, "two panels"
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (finished, resumed))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["device=cpu", "precision=amp_bf16"], "precision: amp_bf16 needs a GPU"),
        (["device=cpu", "microbatch_size=auto"], "microbatch_size: auto needs a GPU"),
        (["device=gpu"], "device: there is no GPU here"),
    ],
)
def test_a_setting_that_needs_a_gpu_is_refused_on_the_cpu(
    overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"^trainer\.{message}"):
        open_device(load_config(None, [f"trainer.{override}" for override in overrides]).trainer)


def test_with_warn_a_run_continues_and_reports_what_did_not_engage() -> None:
    settings = ["trainer.max_duration=1ba", "trainer.device=cpu", "trainer.eval_batches=1", "on_unavailable=warn"]
    with pytest.warns(UserWarning, match="continuing without tf32_matmul"):
        report = run(*settings, "algorithms.tf32_matmul={}")
    entry = report["algorithms"]["tf32_matmul"]
    assert entry["engaged"] is False
    assert "CUDA GPU" in entry["evidence"]["unavailable"]
    reason = (
        "NOT engaged: TF32 needs a CUDA GPU of compute capability 8.0 or newer, and this run is on the cpu; remove the"
    )
    assert reason in summary_table(report, "runs/quickstart")
    report["algorithms"] = {"unpadding": {"engaged": True, "evidence": {"modules": "x" * 200, "note": "saves nothing"}}}
    (line,) = (line for line in summary_table(report, "").splitlines() if "unpadding" in line)
    assert line.startswith("  unpadding          engaged: note saves nothing, modules xx")
    assert (len(line), line[-2:]) == (160, "x…")


def test_a_run_without_validation_callbacks_and_git_writes_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_SPEEDUPS_COMMIT", "abc")
    rows = "".join(f"review number {i},{i % 2}\n" for i in range(16))
    Path("train.csv").write_text(f"text,label\n{rows}")
    without = [f"callbacks.{name}=null" for name in ("throughput", "memory", "finite_loss")]
    report = run("data.source=files", "data.train_file=train.csv", "plot=true", *without)
    assert report["throughput"] == {}
    assert report["memory"] == {}
    assert report["guards"] == {}
    assert (report["environment"]["commit"], report["environment"]["uncommitted_changes"]) == ("abc", None)
    assert "accuracy" not in report["metrics"]
    assert not Path("runs/quickstart/throughput.png").exists()


@pytest.mark.parametrize("vectors", [False, True])
def test_vectors_decay_only_with_decay_bias_and_norm(vectors: bool) -> None:
    """With gradients of 0, an AdamW step only decays the weights."""
    model = tiny_bert()
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    frozen = model.bert.pooler.dense.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.2, decay_bias_and_norm=vectors))
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p is not frozen}
    assert len(grouped) == len({id(p) for p in grouped})
    optimizer.step()
    for name, parameter in model.named_parameters():
        decays = parameter is not frozen and (vectors or parameter.ndim > 1)
        torch.testing.assert_close(parameter.data, torch.full_like(parameter, 0.9 if decays else 1.0), msg=name)


def test_a_warm_up_of_epochs_is_compared_with_batches_once_the_data_are_read() -> None:
    """An epoch of the short job has six batches."""
    with pytest.raises(
        ConfigError, match=r"scheduler\.warmup is 1ep and trainer\.max_duration is 5ba, so the learning"
    ):
        run("scheduler.warmup=1ep", "trainer.max_duration=5ba")
    run("scheduler.warmup=6ba", "trainer.max_duration=1ep", "export=false")


@pytest.mark.parametrize("duration", ["2ep", "5ba", "40sp"])
def test_without_an_interval_a_run_is_evaluated_once_after_training(duration: str) -> None:
    """A baseline's warm-up has the unit of the run's duration."""
    job = ["scheduler.warmup=0.5dur", "trainer.eval_interval=null", "export=false"]
    report = run(*job, f"trainer.max_duration={duration}", "baseline={batches: 10, algorithms: {}}")
    assert [evaluation["batch"] for evaluation in report["evaluations"]] == [report["training"]["batches"]]
