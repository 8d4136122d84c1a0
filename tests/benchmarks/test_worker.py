"""Processes of the runner: ranks that train together, and none that outlives a killed runner."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from composer.utils import dist

from benchmarks import run as runner
from benchmarks import worker
from benchmarks.table_file import Configuration
from benchmarks.worker import Worker, Workers
from composer_speedups.core.errors import ConfigError
from composer_speedups.train.config.schema import TrainerConfig
from composer_speedups.train.trainer import open_device
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS, wait_until


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
@pytest.mark.parametrize("start", ["Worker()", "ColdRun('benchmarks.worker', [], {})"])
def test_a_killed_runner_leaves_no_run_behind(start: str) -> None:
    code = f"from benchmarks.worker import ColdRun, Worker; run = {start}; print(run._process.pid, flush=True)"
    script = [sys.executable, "-c", f"import time; {code}; time.sleep(10_000)"]
    with subprocess.Popen(script, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        run = psutil.Process(int(process.stdout.readline()))
        assert run.is_running()
        process.kill()
    wait_for_end(run)


def wait_for_end(process: psutil.Process) -> None:
    """Wait until a process that is not a child of this one has ended, even if nothing reaps it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, f"process {process.pid} has not ended")


class ImportingWorker(Worker):
    """A worker that executes some code in place of its imports."""

    def __init__(self, imports: str) -> None:
        code = f"import benchmarks.worker as w; w.import_all = lambda: exec({imports!r}); w._main()"
        worker._Process.__init__(self, ["-c", code], {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_worker_whose_imports_print_gets_ready() -> None:
    chatty = ImportingWorker("print('imported')")
    chatty.wait_until_ready()
    chatty.close()


def test_a_worker_that_exits_while_it_imports_is_an_error_although_it_printed_the_message() -> None:
    broken = ImportingWorker("print('ready'); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="a worker exited with status 3 while it imported"):
        broken.wait_until_ready()


def test_children_of_a_run_that_crashed_are_killed() -> None:
    code = "import subprocess as s, sys; print(s.Popen([sys.executable, '-c', 'import time; time.sleep(10_000)']).pid)"
    crashed = worker._Process(["-c", code], {}, stdout=subprocess.PIPE)
    assert crashed._process.stdout is not None
    child = psutil.Process(int(crashed._process.stdout.readline()))
    crashed._process.wait()
    assert child.status() != psutil.STATUS_ZOMBIE
    crashed.close()
    wait_for_end(child)


def test_a_process_group_is_killed_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, other processes may have its ID."""
    killed: list[int] = []
    ended = worker._Process(["-c", ""], {})
    ended._process.wait()
    monkeypatch.setattr("os.killpg", lambda group, _: killed.append(group))
    ended.close()
    ended.close()
    assert killed == [ended._process.pid]


def test_closed_workers_start_no_run() -> None:
    workers = Workers()
    workers.close()
    with pytest.raises(RuntimeError, match="the workers are closed"):
        workers.run("composer_speedups.train", [], {})
    assert not workers._all


def test_closing_kills_workers_for_which_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread holds the lock while its workers import, so close() must not wait for the lock first."""
    started, killed = threading.Event(), threading.Event()

    class Importing:
        def wait_until_ready(self) -> None:
            started.set()
            assert killed.wait(HANGS)
            raise RuntimeError("a worker exited with status -9 while it imported")

        def close(self) -> None:
            killed.set()

    monkeypatch.setattr(worker, "Worker", Importing)
    workers = Workers()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(workers.run, "composer_speedups.train", [], {})
        assert started.wait(HANGS)
        workers.close()
        with pytest.raises(RuntimeError, match="exited with status -9"):
            run.result()


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
    configuration = Configuration("two", {}, [*brief, f"data.cache_dir={Path.cwd()}/cache"], ranks=2)
    report = runner.run_once("yamls/quickstart.yaml", configuration, workers)
    assert report["training"]["ranks"] == 2
    assert "process_seconds" not in report  # the table is not of whole processes
    workers.close()
