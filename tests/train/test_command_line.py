"""train.py as a process: exit codes, one line on stderr, the launcher, two ranks, and the quickstart itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes
from tests.conftest import ROOT
from tests.helpers.forks import Fork
from tests.helpers.jobs import SHORT, run

TRAIN = [sys.executable, str(ROOT / "train.py")]
COMPOSER = [sys.executable, "-m", "composer.cli.launcher"]
QUICKSTART = ["-f", str(ROOT / "yamls" / "quickstart.yaml")]


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def fork(*overrides: str) -> Fork:
    """What train.py does once all is imported, in a process of its own."""

    def job() -> None:
        with exit_codes():
            application.main([*QUICKSTART, *SHORT, *overrides])

    return Fork(job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*QUICKSTART, "data.bach_size=3"], "unknown key 'data.bach_size'; did you mean 'data.batch_size'?"),
        (["-f", "nowhere.yaml"], ": no such file"),
        ([], "no config file"),
        ([*QUICKSTART, "algorithms.fused_optimizr={}"], "did you mean 'fused_optimizer'?"),
    ],
)
@pytest.mark.pins
def test_a_mistake_is_one_line_on_stderr_and_exit_status_2(arguments: list[str], message: str) -> None:
    done = start([*TRAIN, *arguments])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert done.stdout == ""
    assert list(Path().iterdir()) == []


def test_a_technique_that_cannot_engage_is_one_line_and_exit_status_2() -> None:
    done = fork("trainer.device=cpu", "algorithms.tf32_matmul={}").wait()
    assert done.status == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("train.py: tf32_matmul: TF32 needs a CUDA GPU")
    assert "on_unavailable=warn" in line
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()


def test_help_lists_keys_and_techniques_quickly() -> None:
    done = start([*TRAIN, "--help"])
    assert done.returncode == 0
    assert "data.batch_size: int = 40" in done.stdout
    assert "torch_compile" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_the_quickstart_learns_in_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    report = run("trainer.progress_bar=false", "trainer.max_duration=1ep", short=False)
    check_quickstart(report, 0.82)
    assert "samples/s" in capsys.readouterr().out


@pytest.mark.long
def test_the_quickstart_as_it_is_learns_through_the_launcher() -> None:
    done = start([*COMPOSER, "-n", "1", *TRAIN[1:], *QUICKSTART, "trainer.progress_bar=false"])
    assert done.returncode == 0, done.stderr[-3000:]
    check_quickstart(json.loads(Path("runs/quickstart/report.json").read_text()), 0.9)
    assert "samples/s" in done.stdout


def check_quickstart(report: dict[str, Any], accuracy: float) -> None:
    assert report["metrics"]["accuracy"] >= accuracy
    assert all(entry["engaged"] for entry in report["algorithms"].values())


@pytest.mark.slow
def test_two_ranks_train_on_the_cpu_and_end_where_one_does() -> None:
    settings = [*SHORT, "trainer.max_duration=1ep", "trainer.device=cpu"]
    one = run(*settings, "run_name=one")
    done = start([*COMPOSER, "-n", "2", *TRAIN[1:], *QUICKSTART, *settings, "run_name=two"])
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "samples/s" in done.stdout
    two = json.loads(Path("runs/two/report.json").read_text())
    assert two["training"] == {**one["training"], "ranks": 2, "microbatch_size": 4}
    assert two["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=1e-3)
    assert two["metrics"]["accuracy"] == one["metrics"]["accuracy"]
    assert two["throughput"]["samples_per_sec"] > 0
    assert two["throughput"]["padding_fraction"] == pytest.approx(one["throughput"]["padding_fraction"], abs=0.1)
    assert Path("runs/two/model/model.safetensors").exists()


def test_a_killed_run_leaves_nothing_half_written() -> None:
    process = fork("trainer.max_duration=100000ba", "trainer.eval_interval=100000ba", "checkpoint.interval=20ba")
    folder = Path("runs/quickstart")
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoints/*.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.signal(signal.SIGKILL)
    assert process.wait().status == -signal.SIGKILL
    assert list(folder.glob("checkpoints/*.pt")), "the run never came to its first checkpoint"
    assert not (folder / "report.json").exists()
    assert (folder / "config.yaml").read_text().rstrip().endswith("null")
    assert run("trainer.max_duration=1ba", "trainer.eval_batches=1")["training"]["batches"] == 1, "its lock is free"
