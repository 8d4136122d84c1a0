"""Processes of the runner: ranks that train together, and none that outlives a killed runner."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from composer.utils import dist

from benchmarks import run as runner
from benchmarks import worker
from benchmarks.worker import Workers
from composer_speedups.core.errors import ConfigError
from composer_speedups.train.config.schema import TrainerConfig
from composer_speedups.train.trainer import open_device
from tests.conftest import ROOT


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
@pytest.mark.parametrize("start", ["Worker()", "ColdRun('benchmarks.worker', [], {})"])
def test_a_killed_runner_leaves_no_run_behind(start: str) -> None:
    code = f"from benchmarks.worker import ColdRun, Worker; run = {start}; print(run._process.pid, flush=True)"
    script = [sys.executable, "-c", f"import time; {code}; time.sleep(600)"]
    with subprocess.Popen(script, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        run = psutil.Process(int(process.stdout.readline()))
        assert run.is_running()
        process.kill()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(run.pid) and run.is_running():
        with contextlib.suppress(psutil.NoSuchProcess):
            if run.status() == psutil.STATUS_ZOMBIE:
                break
        assert time.monotonic() < deadline
        time.sleep(0.02)


CHATTY = "print('imported')"
LOUD_END = "print('ready'); raise SystemExit(3)"


@pytest.mark.parametrize("imports", [CHATTY, LOUD_END])
def test_what_imports_print_is_not_taken_for_the_message(imports: str) -> None:
    code = f"import benchmarks.worker as w; w.import_all = lambda: exec({imports!r}); w._main()"
    made = worker.Worker.__new__(worker.Worker)
    worker._Process.__init__(made, ["-c", code], {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if imports is CHATTY:
        made.wait_until_ready()
    else:
        with pytest.raises(RuntimeError, match="a worker ended with status 3 before its run"):
            made.wait_until_ready()
    made.close()


def test_children_of_a_run_that_crashed_are_ended() -> None:
    code = "import subprocess as s, sys; print(s.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    crashed = worker._Process(["-c", code], {}, stdout=subprocess.PIPE, stdin=None)
    assert crashed._process.stdout is not None
    child = psutil.Process(int(crashed._process.stdout.readline()))
    crashed._process.wait()
    assert child.is_running()
    crashed.close()
    child.wait(30)


def test_closed_workers_start_no_run() -> None:
    workers = Workers()
    workers.close()
    with pytest.raises(RuntimeError, match="the workers are closed"):
        workers.run("composer_speedups.train", [], {})
    assert not workers._all


def test_more_ranks_than_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "get_local_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"trainer\.device: 2 ranks need one GPU each, and there are 1"):
        open_device(TrainerConfig())


@pytest.mark.long
@pytest.mark.slow
def test_ranks_of_a_configuration_train_together() -> None:
    """Through Composer's launcher, two processes on the CPU."""
    brief = ["data.train_samples=32", "data.eval_samples=8", "trainer.max_duration=1ba", "data.vocab_size=300"]
    workers = Workers()
    configuration = runner.Configuration("two", {}, [*brief, f"data.cache_dir={Path.cwd()}/cache"], ranks=2)
    report = runner.run_once("yamls/quickstart.yaml", configuration, workers)
    assert report["training"]["ranks"] == 2
    assert "process_seconds" not in report  # the table is not of whole processes
    workers.close()
