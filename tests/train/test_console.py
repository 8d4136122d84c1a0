"""Console output of a run, its comparison with a baseline, and logged optimizer metrics."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composer.core import Callback, State
from composer.loggers import Logger
from matplotlib.image import imread

from composer_speedups.callbacks.throughput import Batch
from composer_speedups.core.errors import ConfigError, TechniqueError
from composer_speedups.train import application, console
from composer_speedups.train.baseline import steady_rate
from composer_speedups.train.console import TrainingProgress
from tests.conftest import ROOT
from tests.helpers.common import make_trainer
from tests.helpers.jobs import SHORT, run

EPOCHS = ["trainer.max_duration=2ep", "trainer.progress_bar=true"]


class Clock:
    """Clock that advances by a second per call."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


class Terminal(io.StringIO):
    """Stream with a file descriptor, like a terminal."""

    def fileno(self) -> int:
        return 1


def test_a_run_prints_five_lines_before_training(capfd: pytest.CaptureFixture[str]) -> None:
    run("trainer.max_duration=1ba", "trainer.eval_batches=1", "trainer.progress_bar=true")
    out, err = capfd.readouterr()
    lines = out.splitlines()[:5]
    assert [line.split()[0] for line in lines] == ["model", "data", "techniques", "batch", "results"]
    assert "random BERT of size tiny (2 layers, hidden size 128), 0.5 M parameters" in lines[0]
    assert "48 samples to train on, 16 samples to validate on" in lines[1]
    assert lines[2].split(maxsplit=1)[1] == "fused_optimizer, sdpa_attention"
    assert "8 samples, 1ba in all, on " in lines[3]
    assert lines[4].split()[1] == "runs/quickstart/"
    for text in (out, err):
        assert "google-bert" not in text, "the weights are random, not of this model"
        assert "deprecated" not in text
        assert "data.source" not in text
        assert "prefetch_factor" not in text, "the config is printed by --print-config only"


def test_a_log_file_gets_lines_with_one_based_epochs_and_full_metric_names(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_BETWEEN_LINES", (0.1, 0.0))
    run(*EPOCHS)
    lines = [line for line in capfd.readouterr().err.splitlines() if "epoch" in line]
    assert lines[0].startswith("training   8%  epoch 1/2, batch 1, loss 0.")
    assert lines[0].endswith(" left")
    assert any(" samples/s, " in line for line in lines)
    evaluations = [line for line in lines if "accuracy" in line]
    assert [line.split(":")[0] for line in evaluations] == ["epoch 1/2, batch 6", "epoch 2/2, batch 12"]
    assert all(name in evaluations[0] for name in (" loss ", " macro_f1 ", " matthews "))


def test_the_progress_bar_shows_loss_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_is_terminal", lambda stream: True)
    screen = Terminal()
    trainer = make_trainer([], loggers=[TrainingProgress(screen, Clock())], max_duration="4ba")
    trainer.fit()
    trainer.close()
    last = screen.getvalue().strip().splitlines()[-1].split("\r")[-1]
    assert last.startswith("training 100%|")
    assert "| batch 4, loss 0." in last
    assert last.endswith("0:00 left")


def test_print_config_prints_a_valid_config_without_training(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-f", str(ROOT / "yamls" / "quickstart.yaml"), *SHORT, "trainer.max_duration=1ba"]
    with pytest.raises(SystemExit) as stopped:
        application.main([*arguments, "--print-config"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["data"]["train_samples"] == 48
    assert list(Path().iterdir()) == []
    Path("printed.yaml").write_text(printed)
    application.main(["-f", "printed.yaml"])
    assert json.loads(Path("runs/quickstart/report.json").read_text())["training"]["batches"] == 1


BASELINE = [
    "algorithms.sdpa_attention=null",
    "algorithms.unpadding={}",
    "baseline={batches: 10, algorithms: {sdpa_attention: {}}}",
]


def test_a_baseline_is_reported_and_does_not_change_the_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = ["trainer.max_duration=3ba", "model.dropout=0.1"]
    compared = run(*settings, *BASELINE)
    printed = capfd.readouterr().out
    baseline = compared["baseline"]
    assert baseline["algorithms"] == ["sdpa_attention"]
    assert baseline["batches"] == 10
    ratio = baseline["run_samples_per_sec"] / baseline["samples_per_sec"]
    assert ratio > 0
    last = printed.strip().splitlines()[-1]
    assert last.startswith(f"unpadding, fused_optimizer in place of sdpa_attention: {ratio:.2f} times as fast")
    plain = run(*settings, *BASELINE[:2])
    assert plain["baseline"] is None
    assert plain["metrics"] == compared["metrics"]
    assert compared["training"]["batches"] == 3


def test_the_baselines_rate_excludes_warm_up_and_the_first_batch_of_each_turn() -> None:
    def batch(index: int, seconds: float, steady: bool = True) -> Batch:
        return Batch(index, 8, 0, 0, 0, 0.0, seconds, 0.0, steady)

    turns = [batch(1, 9.0, False), batch(2, 7.0, False), batch(3, 1.0), batch(4, 5.0), batch(5, 3.0), batch(6, 4.0)]
    assert steady_rate(turns, turn=3) == 3 * 8 / (1.0 + 3.0 + 4.0)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("baseline={algorithms: {unpading: {}}}", ConfigError, r"baseline\.algorithms\.unpading is not a technique"),
        ("baseline={algorithms: 3}", ConfigError, r"baseline\.algorithms must contain technique names, not 3"),
        ("baseline={batches: 1}", ConfigError, r"baseline\.batches must be 10 to 100000"),
        ("baseline={algorithms: {tf32_matmul: {}}}", TechniqueError, "tf32_matmul: TF32 needs a CUDA GPU"),
        ("baseline={algorithms: {unpadding: {}, sdpa_attention: {}}}", TechniqueError, "conflicts with"),
    ],
)
def test_a_baseline_that_cannot_be_trained_is_refused(override: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(override, "trainer.device=cpu")
    assert not Path("runs/quickstart/report.json").exists()


class Steps(Callback):
    """Record the learning rate and the gradient norm that the optimizer sees in each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    log = Logger.log_metrics

    def record(self: Logger, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
        log(self, metrics, step)

    monkeypatch.setattr(Logger, "log_metrics", record)
    return found


@pytest.mark.parametrize("threshold", ["1e6", "1e-3"])
def test_learning_rate_and_gradient_norm_are_logged(
    logged: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, threshold: str
) -> None:
    steps = Steps()
    before: Any = application.train
    monkeypatch.setattr(application, "train", lambda *a, **k: before(*a, **k, callbacks=[steps]))
    run("trainer.max_duration=4ba", "trainer.eval_batches=1", f"optimizer.max_grad_norm={threshold}")
    assert logged["optimizer/learning_rate"] == steps.rates
    assert len(set(steps.rates)) == 3, "the schedule changes it"
    assert len(logged["optimizer/gradient_norm"]) == 4
    if threshold == "1e6":  # nothing is clipped
        torch.testing.assert_close(logged["optimizer/gradient_norm"], steps.norms)
    else:
        assert min(logged["optimizer/gradient_norm"]) > 100 * max(steps.norms), "the norm before clipping is logged"


def test_without_clipping_no_norm_is_computed(logged: dict[str, list[float]]) -> None:
    run("trainer.max_duration=2ba", "trainer.eval_batches=1", "optimizer.max_grad_norm=null")
    assert len(logged["optimizer/learning_rate"]) == 2
    assert "optimizer/gradient_norm" not in logged


def test_the_plot_of_a_resumed_run_contains_all_losses_and_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from composer_speedups.train import report

    drawn: list[Any] = []
    plot = report.plot_run

    def recorded(*arguments: Any, **settings: Any) -> None:
        drawn.append(arguments[1])
        plot(*arguments, **settings)

    monkeypatch.setattr(report, "plot_run", recorded)
    settings = ["plot=true", "checkpoint.interval=3ba", "checkpoint.keep=-1", "trainer.max_duration=2ep"]
    run(*settings, "run_name=whole")
    run(*settings, "run_name=part", "checkpoint.load=runs/whole/checkpoints/ep1-ba9-rank0.pt")
    whole, part = drawn
    assert list(whole.losses) == list(range(1, 13))
    assert list(whole.evaluations) == [6, 12]
    assert {"accuracy", "loss"} <= set(whole.evaluations[6])
    assert (part.losses, part.evaluations) == (whole.losses, whole.evaluations)
    height, width = imread("runs/part/throughput.png").shape[:2]
    assert height > 0.7 * width, "two panels"
