"""Processes of runs: their output, time limit and children, and several at a time that are stopped together."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from composer_speedups.core.processes import killed_with_parent
from composer_speedups.sweep import forks, processes
from composer_speedups.sweep.processes import Ended, Job, Process, run_all
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS, wait_until

# It starts a child, and notes its process IDs, when it ran, and SIGTERM.
PROGRAM = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
name, seconds, status = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(10_000)"])
with open(f"{name}.pids", "w") as pids:
    pids.write(f"{os.getpid()} {child.pid} ")
print("started", name, os.environ.get("NOTED"), flush=True)
began = time.time()
time.sleep(seconds)
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps([name, began, time.time()]) + "\\n")
sys.exit(status)
"""

# It says what of torch is loaded when it begins, and whether CUDA could be opened.
LOADED = """
import sys, threading
print("composer.trainer" in sys.modules, "torchao" in sys.modules, threading.active_count(), __name__, sys.argv[1:])
import torch
print(torch.cuda._is_in_bad_fork())
raise ValueError("an error")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the module PROGRAM; LOADED can be imported, too."""
    Path("sleeps.py").write_text(PROGRAM)
    Path("loaded.py").write_text(LOADED)
    monkeypatch.syspath_prepend(tmp_path)
    return "sleeps"


def job(program: str, name: str, seconds: float = 0.0, status: int = 0, *, cold: bool = False) -> Job:
    return Job([name, str(seconds), str(status)], Path(f"{name}.log"), {"NOTED": "noted"}, program, cold=cold)


def pids_of(name: str) -> list[int]:
    path = Path(f"{name}.pids")
    wait_until(lambda: path.exists() and path.read_text().endswith(" "), f"{name} does not start")
    return [int(pid) for pid in path.read_text().split()]


def wait_for_end(pids: list[int]) -> None:
    """Wait until processes have ended, even if nothing reaps them."""

    def ended(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(lambda: all(map(ended, pids)), f"one of {pids} does not end")


COLD = pytest.mark.parametrize("cold", [False, True])


@COLD
def test_a_process_ends_with_its_output_and_its_children(
    program: str, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    Path("a.log").write_text("of an earlier process\n")
    process = Process(job(program, "a", status=3, cold=cold))
    ended = process.wait(HANGS)
    assert (ended.status, ended.output) == (3, "started a noted\n")
    assert 0 < ended.seconds < HANGS
    wait_for_end(pids_of("a"))
    killed: list[int] = []
    monkeypatch.setattr("os.killpg", lambda group, _: killed.append(group))
    process.kill()
    assert not killed, "the ID of the group may belong to others by now"


@COLD
def test_a_process_is_killed_at_its_time_limit(program: str, cold: bool) -> None:
    process = Process(job(program, "a", 10_000, cold=cold))
    pids = pids_of("a")
    assert process.wait(0.1)[:2] == (None, "started a noted\n")
    wait_for_end(pids)


def test_jobs_run_in_order_and_as_many_at_a_time_as_given(program: str) -> None:
    ended: dict[str, int | None] = {}

    def done(job: Job, how: Ended) -> None:
        ended[job.arguments[0]] = how.status

    run_all([job(program, name, 0.3, status) for name, status in (("a", 0), ("b", 1), ("c", 0), ("d", 0))], 2, done)
    assert ended == {"a": 0, "b": 1, "c": 0, "d": 0}
    calls = [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]
    assert sorted(name for name, _, _ in calls) == ["a", "b", "c", "d"]
    for now in (began for _, began, _ in calls):
        assert sum(began <= now < end for _, began, end in calls) <= 2


def test_an_exception_stops_the_running_jobs_and_starts_no_other(program: str) -> None:
    def done(job: Job, ended: Ended) -> None:
        pids_of("b")
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_all([job(program, "a", 1), job(program, "b", 10_000), job(program, "c")], 2, done)
    assert time.monotonic() - began < HANGS
    wait_for_end(pids_of("b"))
    assert Path("b.log").read_text().endswith("stopped\n"), "by SIGTERM, so that a run writes a checkpoint"
    assert not Path("c.log").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux")
def test_a_job_begins_with_everything_imported_and_may_open_cuda(program: str) -> None:
    ended = Process(Job(["a=1"], Path("log"), program="loaded")).wait(HANGS)
    assert ended.output.startswith("True False 1 __main__ ['a=1']\nFalse\nTraceback")
    assert (ended.status, ended.kind, ended.reason) == (1, "failed", "ValueError: an error")


@COLD
def test_a_job_gets_a_large_environment(program: str, cold: bool) -> None:
    """Larger than one message of a socket."""
    large = {"NOTED": "noted", **{f"LARGE_{i}": "x" * 100_000 for i in range(4)}}
    ended = Process(Job(["a", "0", "0"], Path("log"), large, program, cold=cold)).wait(HANGS)
    assert (ended.status, ended.output) == (0, "started a noted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux")
def test_the_imports_are_no_part_of_a_jobs_duration(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(what: str) -> float:
        order.append(what)
        return float(len(order))

    monkeypatch.setattr(processes, "start_server", lambda: noted("imports"))
    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=lambda: noted("clock")))
    ended = Process(job(program, "a")).wait(HANGS)
    assert (order, ended.seconds) == (["imports", "clock", "clock"], 1.0)


# Python imports it first of all: it asks for the GPUs in the process from which jobs are forked, and in no other.
ASKS = """
import sys
if "composer_speedups.sweep.forks" in sys.orig_argv:
    import torch
    torch._C._cuda_getDeviceCount()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux")
@pytest.mark.skipif(not hasattr(torch._C, "_cuda_isInBadFork"), reason="needs torch with CUDA")
def test_jobs_start_cold_if_an_import_asked_for_a_gpu(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sitecustomize.py").write_text(ASKS)
    monkeypatch.setattr(forks, "_server", None)
    try:
        ended = Process(Job(["a=1"], Path("log"), program="loaded")).wait(HANGS)
    finally:
        forks._end_server()
    assert ended.output.startswith("False False 1 __main__ ['a=1']\nFalse\nTraceback")


@COLD
@pytest.mark.skipif(not killed_with_parent(), reason="needs setpriv of util-linux 2.33")
def test_a_killed_command_leaves_no_run_behind(program: str, cold: bool) -> None:
    code = f"""
import sys; sys.path += [{str(ROOT)!r}, "."]
from pathlib import Path
from composer_speedups.sweep.processes import Job, Process
Process(Job(["a", "10_000", "0"], Path("a.log"), {{}}, {program!r}, cold={cold})).wait()
"""
    with subprocess.Popen([sys.executable, "-c", code]) as command:
        pids = pids_of("a")
        command.kill()
    wait_for_end(pids[:1])
    psutil.Process(pids[1]).kill()  # a DataLoader's worker, unlike this child, ends with its parent
