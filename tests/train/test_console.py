"""Console output of a run, its comparison with a baseline, and its start-up up to the first step."""

from __future__ import annotations

import gc
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from composer.utils.collect_env import get_cpu_model

from composer_speedups.callbacks.memory import MemoryAnatomy
from composer_speedups.callbacks.throughput import Batch, ThroughputMonitor
from composer_speedups.train import application, console
from composer_speedups.train.baseline import steady_rate, turn_ratios
from composer_speedups.train.config.load import load_config
from composer_speedups.train.console import TrainingProgress
from composer_speedups.train.report import summary_table
from composer_speedups.train.startup import prefetch_cpu_model, without_gc
from tests.conftest import ROOT
from tests.helpers.common import trained
from tests.helpers.jobs import SHORT, run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_run_prints_six_lines_and_then_lines_with_one_based_epochs_and_full_metric_names(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_MIN_SECONDS", 0.0)
    run("trainer.max_duration=2ep", "trainer.progress_bar=true")
    out, err = capfd.readouterr()
    lines = out.splitlines()[:6]
    assert [line.split()[0] for line in lines] == ["model", "data", "check", "techniques", "batch", "results"]
    assert "random BERT of size tiny (2 layers, hidden size 128), 0.5 M parameters" in lines[0]
    assert "48 samples to train on, 16 samples to validate on" in lines[1]
    assert lines[3].split(maxsplit=1)[1] == "fused_optimizer, sdpa_attention"
    assert "8 samples, 2ep in all, on " in lines[4]
    assert lines[5].split()[1] == "runs/quickstart/"
    assert lines[5].endswith("checkpoint.interval is not set, so an interrupted run is lost")
    for text in (out, err):
        assert "google-bert" not in text, "the weights are random, not of this model"
        assert "deprecated" not in text
        assert "data.source" not in text, "the config is printed by --print-config only"
    lines = [line for line in err.splitlines() if "epoch" in line]
    assert lines[0].startswith("training   8%  epoch 1/2, batch 1, loss 0.")
    assert lines[0].endswith(" left")
    assert any(" samples/s, " in line for line in lines)
    evaluations = [line for line in lines if "accuracy" in line]
    assert [line.split(":")[0] for line in evaluations] == ["epoch 1/2, batch 6", "epoch 2/2, batch 12"]
    assert all(name in evaluations[0] for name in (" loss ", " macro_f1 ", " matthews "))


def test_the_progress_bar_shows_loss_and_remaining_time() -> None:
    screen = Terminal()
    trained([], loggers=[TrainingProgress(screen)], max_duration="4ba")
    last = screen.getvalue().strip().splitlines()[-1].split("\r")[-1]
    assert last.startswith("training 100%|")
    assert "| batch 4, loss 0." in last
    assert last.endswith("00:00 left")


def test_the_time_and_memory_of_the_run_are_printed_once() -> None:
    screen = io.StringIO()
    progress = TrainingProgress(screen)
    progress.log_metrics({"memory/peak_gib": 3.44})
    progress.log_metrics({"throughput/samples_per_sec": 5.0, "throughput/planned_seconds": 700.0})
    assert screen.getvalue() == "training takes about 12 minutes and 3.4 GiB, evaluations not included\n"
    assert console.about(119.4, None) == "about 119 seconds"
    assert console.about(0.42, 3.44) == "about 0.4 seconds and 3.4 GiB"
    terminal = Terminal()
    watching = [ThroughputMonitor(interval=2), MemoryAnatomy()]
    trained([], loggers=[TrainingProgress(terminal)], callbacks=watching, max_duration="16ba")
    assert len(re.findall(r"training takes about [\d.]+ seconds and [\d.]+ GiB, evaluations", terminal.getvalue())) == 1


def test_print_config_prints_a_valid_config_without_training(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = ROOT / "yamls" / "quickstart.yaml"
    with pytest.raises(SystemExit) as stopped:
        application.main(["-f", str(quickstart), *SHORT, "--print-config"])
    assert stopped.value.code == 0
    assert list(Path().iterdir()) == []
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert load_config("printed.yaml") == load_config(quickstart, SHORT)


BASELINE = [
    "algorithms.sdpa_attention=null",
    "algorithms.unpadding={}",
    "baseline={batches: 10, algorithms: {sdpa_attention: {}}}",
]


def test_a_baseline_is_reported_and_does_not_change_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["trainer.max_duration=3ba", "model.dropout=0.1"]
    compared = run(*settings, *BASELINE, "trainer.progress_bar=true")
    printed = capfd.readouterr().out
    assert "comparing with the baseline, 10 batches each\n" in printed
    baseline = compared["baseline"]
    assert baseline["algorithms"] == ["sdpa_attention"]
    assert baseline["batches"] == 10
    ratio = baseline["run_samples_per_sec"] / baseline["samples_per_sec"]
    assert ratio > 0
    last = printed.strip().splitlines()[-1]
    change = "unpadding, fused_optimizer in place of sdpa_attention: "
    assert last.startswith(change)
    assert f"{ratio:.2f} times as fast" in last
    plain = run(*settings, *BASELINE[:2])
    assert plain["baseline"] is None
    assert plain["metrics"] == compared["metrics"]
    assert compared["training"]["batches"] == 3


REPORT = yaml.safe_load("""
run_name: job
throughput: {samples_per_sec: 99.96, tokens_per_sec: 100.4, mfu: 0.5, peak: {flops_per_sec: 2.0e+12, precision: bf16}}
memory: {peak_gib: 1.5}
environment: {gpu: null}
metrics: {macro_f1: 0.875}
classes: {}
best: {batch: 7, metric: loss, value: 0.125}
early_stopping: {stopped: true}
ddp: {mib_a_step: 1.5, overlapped_steps: 2}
training: {ranks: 2, batches: 9, microbatch_size: 8, microbatch_chosen: by hand, last_batch_samples: 8}
startup: {a_seconds: 1, b_seconds: 3, c_seconds: 2, d_seconds: 5, e_seconds: 4, to_first_step_seconds: 15}
wall_seconds: 1234.5
config: {trainer: {microbatch_tokens: 1000}}
resumed: [{batch: 4}, {batch: 6}]
baseline: {samples_per_sec: 2, run_samples_per_sec: 3, batches: 5, algorithms: [whole, old], turn_ratios: [1.25, 2.0]}
""")
LENGTHS = {"whole": 128, "cut": 129, "off": 129}
REPORT["algorithms"] = {name: {"engaged": name != "off", "evidence": {"e": "x" * LENGTHS[name]}} for name in LENGTHS}
TABLE = f"""
job: runs/job/report.json
  samples/s            99.96  steady state, data wait included on 2 ranks
  tokens/s               100  without padding
  MFU                    0.5  of 2 TFLOP/s (bf16)
  peak memory            1.5  GiB resident
  macro f1             0.875
  best                     7  batches trained; loss was 0.125
  stopped early            9  batches trained
  gradients              1.5  MiB reduced per step; 2 steps overlap
  microbatch               8  samples per forward pass and device, with at most 1,000 real tokens, chosen by hand
  start-up                15  s to the end of the first step: d 5.0, e 4.0, b 3.0, c 2.0
  wall time            1,234  s, from the start of the process, and of those before it: resumed after batch 4, 6
  whole              engaged: e {"x" * 128}
  cut                engaged: e {"x" * 127}…
  off                NOT engaged: e {"x" * 129}

cut in place of old: 1.50 times as fast on this machine (3 and 2 samples/s, 5 batches each, in turns before the run; \
1.25 to 2.00 times in single turns)"""


def test_the_table_of_a_report() -> None:
    assert summary_table(REPORT, "runs/job") == TABLE
    undecided = " old: the turns do not tell which is faster; over all of them, 1.50 times as fast on "
    for section, values, text in (
        ("training", {"ranks": 1}, "  steady state, data wait included\n"),
        ("ddp", {"overlapped_steps": 0}, "  MiB reduced per step\n"),
        ("environment", {"gpu": "H100"}, "  GiB of the GPU\n"),
        ("config", {"trainer": {"microbatch_tokens": None}}, "  samples per forward pass and device, chosen by hand\n"),
        ("baseline", {"turn_ratios": [1.0, 0.63]}, undecided),
        ("baseline", {"turn_ratios": [1.0, 5.78]}, undecided),
        ("baseline", {"turn_ratios": []}, " old: 1.50 times as fast on "),
    ):
        assert text in summary_table({**REPORT, section: {**REPORT[section], **values}}, "runs/job")
    assert "  s, from the start of the process\n" in summary_table({**REPORT, "resumed": []}, "runs/job")


def test_the_baselines_rate_excludes_warm_up_and_the_first_batch_of_each_turn() -> None:
    def batch(index: int, seconds: float, steady: bool = True) -> Batch:
        return Batch(index, 8, 0, 0, 0, 0.0, seconds, 0.0, steady)

    turns = [batch(1, 9.0, False), batch(2, 7.0, False), batch(3, 1.0), batch(4, 5.0), batch(5, 3.0), batch(6, 4.0)]
    assert steady_rate(turns, turn=3) == 3 * 8 / (1.0 + 3.0 + 4.0)
    slower = [batch(i, 2 * b.seconds, b.steady) for i, b in enumerate(turns)]
    assert turn_ratios(slower, turns, turn=3) == [2.0, 2.0]
    assert turn_ratios(slower, turns[:2], turn=3) == [], "no steady batch"
    uneven = [*turns[:4], batch(5, 6.0), batch(6, 8.0)]
    assert turn_ratios(uneven, turns, turn=3) == [1.0, 2.0]


def test_objects_made_by_imports_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    with without_gc():
        pass
    assert gc.get_freeze_count() == before, "torch was already imported"
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with without_gc():
            assert not gc.isenabled()
            sys.modules["torch"] = torch
            made: list[list[int]] = [[] for _ in range(100_000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() > before + len(made)
    finally:
        gc.unfreeze()


def test_the_cpu_model_is_cached_early() -> None:
    get_cpu_model.cache_clear()
    prefetch_cpu_model().join(60)
    assert get_cpu_model.cache_info().currsize == 1


@pytest.mark.gpu
def test_a_gpu_is_opened_early() -> None:
    code = (
        "import sys, threading; sys.path.insert(0, sys.argv[1]);"
        "from composer_speedups.train.config.schema import Config;"
        "from composer_speedups.train.startup import open_gpu_early;"
        "import torch; assert not torch.cuda.is_initialized();"
        "open_gpu_early(Config()); [t.join(60) for t in threading.enumerate() if t.daemon];"
        "assert torch.cuda.is_initialized() and torch.cuda.memory_allocated() == 0"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True)
