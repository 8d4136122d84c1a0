"""train.py in this process: report, saved config, run folders, export, resume."""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from composer_speedups.core.errors import ConfigError, DataError, TechniqueError
from composer_speedups.train.config.load import load_config
from composer_speedups.train.report import summary_table
from tests.helpers.jobs import run


@pytest.mark.pins
def test_the_report_has_the_measurements_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    techniques = "algorithms.torch_compile={backend: aot_eager, scope: blocks}"
    report = run("trainer.max_duration=12ba", "plot=true", techniques)
    throughput, memory, metrics = report["throughput"], report["memory"], report["metrics"]
    for name in ("samples_per_sec", "tokens_per_sec", "padding_fraction", "mfu", "step_seconds", "warmup_seconds"):
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
    assert report["numerics"] == {
        "weights": "float32",
        "precision": "fp32",
        "matmul": "fp32",
        "float32_matmul_precision": "highest",
    }
    environment = report["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["composer"] == "0.32.1"
    assert {"gpu", "transformers", "commit", "cpu", "driver"} <= set(environment)
    assert report["training"]["batches"] == 12
    assert report["wall_seconds"] > 0
    assert report["config"]["data"]["train_samples"] == 48
    assert Path("runs/quickstart/throughput.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "samples/s" in printed
    assert "fused_optimizer" in printed
    assert "engaged" in printed


def test_the_saved_config_reproduces_the_run() -> None:
    first = run("trainer.max_duration=3ba")
    saved = load_config("runs/quickstart/config.yaml")
    assert saved.data.train_samples == 48
    from composer_speedups.train import application

    application.main(["-f", "runs/quickstart/config.yaml", "run_name=again"])
    again = json.loads(Path("runs/again/report.json").read_text())
    assert again["metrics"] == first["metrics"]
    assert again["config"] == {**first["config"], "run_name": "again"}


def test_an_earlier_run_is_kept_and_a_run_in_use_is_refused() -> None:
    run("trainer.max_duration=1ba", "trainer.eval_batches=1")
    Path("runs/quickstart/notes.txt").write_text("mine")
    run("trainer.max_duration=2ba", "trainer.eval_batches=1")
    kept = [p for p in Path("runs").glob("quickstart.*") if p.is_dir()]
    assert len(kept) == 1
    assert (kept[0] / "notes.txt").read_text() == "mine"
    assert json.loads((kept[0] / "report.json").read_text())["training"]["batches"] == 1
    before = sorted(Path("runs").rglob("*"))
    with open("runs/.quickstart.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="run_name: 'quickstart' is in use"):
            run("trainer.max_duration=1ba")
    assert sorted(Path("runs").rglob("*")) == before


def test_the_lock_does_not_follow_a_symbolic_link() -> None:
    Path("precious").write_text("mine")
    Path("runs").mkdir()
    Path("runs/.quickstart.lock").symlink_to("../precious")
    with pytest.raises(ConfigError, match=r"^runs_folder: runs/\.quickstart\.lock is a symbolic link"):
        run("trainer.max_duration=1ba")
    assert Path("precious").read_text() == "mine"
    assert [path.name for path in Path("runs").iterdir()] == [".quickstart.lock"]


def test_a_refused_run_leaves_the_earlier_run_unchanged() -> None:
    run("trainer.max_duration=1ba", "trainer.eval_batches=1")
    folder = Path("runs/quickstart")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ConfigError, match=r"data\.drop_last: the 4 training samples do not fill one batch"):
        run("data.train_samples=4", "data.batch_size=8", "data.drop_last=true")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert [path for path in Path("runs").iterdir() if path.is_dir()] == [folder]


def test_a_run_that_is_refused_while_its_trainer_is_built_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_speedups.train import trainer

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("algorithms: refused")

    monkeypatch.setattr(trainer, "build_trainer", refuse)
    for _ in range(2):
        with pytest.raises(ConfigError, match="algorithms: refused"):
            run("trainer.max_duration=1ba")
        assert [path for path in Path("runs").iterdir() if path.is_dir()] == []
    monkeypatch.undo()
    run("trainer.max_duration=1ba", "trainer.eval_batches=1")
    before = sorted(Path("runs").rglob("*"))
    monkeypatch.setattr(trainer, "build_trainer", refuse)
    with pytest.raises(ConfigError, match="algorithms: refused"):
        run("trainer.max_duration=1ba")
    assert sorted(Path("runs").rglob("*")) == before


def test_a_folder_that_cannot_be_written_is_refused_in_one_line() -> None:
    Path("file").touch()
    with pytest.raises(ConfigError, match=r"runs_folder: file/deep/quickstart \(relative to /.*\) is not writable"):
        run("runs_folder=file/deep")


@pytest.mark.pins
def test_the_export_loads_without_this_package_and_gives_the_same_logits() -> None:
    report = run("trainer.max_duration=4ba", "checkpoint.interval=1ep", "algorithms.mixed_precision.allow_cpu=true")
    model: Any = AutoModelForSequenceClassification.from_pretrained("runs/quickstart/model")
    tokenizer = AutoTokenizer.from_pretrained("runs/quickstart/model")
    weights = load_file("runs/quickstart/model/model.safetensors")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert report["algorithms"]["mixed_precision"]["engaged"]
    assert {w.dtype for w in weights.values()} == {torch.float32}
    checkpoint = next(Path("runs/quickstart/checkpoints").glob("ep*.pt"))
    trained = torch.load(checkpoint, weights_only=False)["state"]["model"]
    torch.testing.assert_close(weights, {n: trained[f"model.{n}"] for n in weights}, rtol=0, atol=0)
    inputs = tokenizer("the plot was not dull", return_tensors="pt")
    assert model(**inputs).logits.shape == (1, 2)


@pytest.mark.pins
def test_resuming_a_run_ends_where_the_uninterrupted_one_does() -> None:
    settings = ["trainer.max_duration=2ep", "model.dropout=0.1", "checkpoint.interval=4ba", "checkpoint.keep=-1"]
    whole = run(*settings, "run_name=whole")
    resumed = run(*settings, "run_name=part", "checkpoint.load=runs/whole/checkpoints/ep0-ba4-rank0.pt", "plot=true")
    assert resumed["metrics"] == whole["metrics"]
    assert resumed["training"]["batches"] == 12
    assert Path("runs/part/throughput.png").read_bytes().startswith(b"\x89PNG")
    one, other = (load_file(f"runs/{name}/model/model.safetensors") for name in ("whole", "part"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"written with techniques \[FusedOptimizer.*this run has \[SDPA"):
        run(*settings, "checkpoint.load=runs/whole/checkpoints/ep0-ba4-rank0.pt", "algorithms.fused_optimizer=null")


def test_resuming_from_the_runs_own_folder_keeps_the_folder() -> None:
    settings = ["checkpoint.interval=2ba", "checkpoint.keep=-1", "trainer.eval_batches=1"]
    run(*settings, "trainer.max_duration=2ba")
    run(*settings, "trainer.max_duration=4ba", "checkpoint.load=runs/quickstart/checkpoints/ep0-ba2-rank0.pt")
    assert [p.name for p in Path("runs").iterdir() if p.is_dir()] == ["quickstart"]


def test_conflicts_and_bad_data_are_refused_before_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("composer_speedups.tasks.models.build_model", forbidden)
    with pytest.raises(TechniqueError, match="foreach_optimizer: conflicts with fused_optimizer"):
        run("algorithms.foreach_optimizer={}")
    with pytest.raises(TechniqueError, match="tf32_matmul: TF32 needs a CUDA GPU"):
        run("algorithms.tf32_matmul={}", "trainer.device=cpu")
    assert not Path("runs").exists()
    Path("bad.csv").write_text("text,label\nfine,1\nwrong,0\nlate,0.5\n")
    with pytest.raises(DataError, match=r"bad\.csv, row 3: label is 0\.5"):
        run("data.source=files", "data.train_file=bad.csv")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.parallelism_config={fsdp: {}}", r"trainer\.parallelism_config: Composer's FSDP needs GPUs"),
        ("trainer.precision=amp_bf16", r"trainer\.precision: amp_bf16 needs a GPU"),
        ("trainer.microbatch_size=auto", r"trainer\.microbatch_size: auto needs a GPU"),
    ],
)
def test_settings_that_need_a_gpu_are_refused_on_the_cpu(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(override, "trainer.device=cpu")


def test_a_missing_gpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.device: there is no GPU here"):
        run("trainer.device=gpu")


def test_with_warn_a_run_continues_and_reports_what_did_not_engage() -> None:
    with pytest.warns(UserWarning, match="continuing without tf32_matmul"):
        report = run(
            "trainer.max_duration=1ba",
            "trainer.device=cpu",
            "trainer.eval_batches=1",
            "on_unavailable=warn",
            "algorithms.tf32_matmul={}",
        )
    entry = report["algorithms"]["tf32_matmul"]
    assert entry["engaged"] is False
    assert "CUDA GPU" in entry["evidence"]["unavailable"]
    assert "NOT engaged" in summary_table(report, "runs/quickstart")


def test_a_masked_lm_trains_and_exports() -> None:
    report = run("model.task=mlm", "trainer.max_duration=3ba", "algorithms=null")
    assert report["metrics"]["loss"] > 0
    assert report["throughput"]["mfu"] > 0


def test_microbatches_give_the_same_run() -> None:
    one = run("trainer.max_duration=3ba", "run_name=one")
    four = run("trainer.max_duration=3ba", "run_name=four", "trainer.microbatch_size=2")
    assert four["metrics"]["train_loss"] == pytest.approx(one["metrics"]["train_loss"], rel=1e-3)


def test_a_run_without_validation_and_callbacks_writes_a_report() -> None:
    rows = "".join(f"review number {i},{i % 2}\n" for i in range(16))
    Path("train.csv").write_text(f"text,label\n{rows}")
    without = ["callbacks.throughput=null", "callbacks.memory=null"]
    report = run("data.source=files", "data.train_file=train.csv", "plot=true", *without)
    assert report["throughput"] == {}
    assert report["memory"] == {}
    assert "accuracy" not in report["metrics"]
    assert not Path("runs/quickstart/throughput.png").exists()
