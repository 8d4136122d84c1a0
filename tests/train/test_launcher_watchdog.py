"""A rank stops soon after its launcher, as on SIGTERM; a process without a launcher keeps running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from composer_speedups.train import launcher_watchdog
from composer_speedups.train.launcher_watchdog import watch_launcher
from tests.conftest import ROOT

# A process with a launcher's name, which starts a rank and waits; the rank ignores SIGTERM if "stubborn" is given. With
# "late", it looks once at the start, and ends when its stdin is closed.
_LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen([sys.executable, "rank.py", *sys.argv[1:]])
process.wait()
"""
_RANK = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from composer_speedups.train.launcher_watchdog import watch_launcher
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), watch_launcher(look=60 if "late" in sys.argv else 0.05, grace=0.5), flush=True)
sys.stdin.read() if "late" in sys.argv else time.sleep(60)
"""


def started_by(name: str, *arguments: str, **environment: str) -> tuple[subprocess.Popen[str], psutil.Process, bool]:
    """Start a process with that name; return it, its rank, and whether the rank watches its launcher."""
    Path(name).write_text(_LAUNCHER)
    Path("rank.py").write_text(_RANK.format(root=str(ROOT)))
    cleared = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
    process = subprocess.Popen(
        [sys.executable, name, *arguments],
        env={**cleared, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid, watches = process.stdout.readline().split()
    return process, psutil.Process(int(pid)), watches == "True"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("stubborn", [[], ["stubborn"]])
def test_a_rank_stops_soon_after_its_launcher(how: signal.Signals, stubborn: list[str]) -> None:
    process, rank, watches = started_by("composer", *stubborn, LOCAL_RANK="0")
    assert watches
    time.sleep(0.3)
    assert rank.is_running(), "the rank runs as long as its launcher"
    process.send_signal(how)
    rank.wait(20)
    stderr = process.communicate()[1]
    assert stderr == f"train.py: the launcher (process {process.pid}) ended before its ranks, so this rank stops\n"


def test_a_rank_that_ends_before_it_looks_says_why() -> None:
    process, _, watches = started_by("composer", "late", LOCAL_RANK="0")
    assert watches
    process.kill()
    process.wait()
    # closes stdin: now the rank ends by itself, as one that another rank told to stop
    stderr = process.communicate(timeout=20)[1]
    assert stderr == f"train.py: the launcher (process {process.pid}) ended before its ranks, so this rank stops\n"


def test_a_rank_whose_launcher_lives_ends_silently() -> None:
    process, _, watches = started_by("composer", "late", LOCAL_RANK="0")
    assert watches
    assert process.communicate(timeout=20)[1] == ""  # closes stdin


@pytest.mark.parametrize(("name", "environment"), [("composer", {}), ("start.sh", {"LOCAL_RANK": "0"})])
def test_a_process_without_a_launcher_outlives_its_parent(name: str, environment: dict[str, str]) -> None:
    process, rank, watches = started_by(name, **environment)
    assert not watches
    process.kill()
    process.wait()
    time.sleep(0.5)
    try:
        assert rank.is_running()
    finally:
        rank.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ([sys.executable, "/env/bin/composer", "-n", "2", "train.py"], True),
        ([sys.executable, "-m", "composer.cli.launcher", "-n", "2"], True),
        (["/usr/bin/torchrun", "train.py"], True),
        ([sys.executable, "-m", "torch.distributed.run", "train.py"], True),
        (["bash", "job.sh"], False),
        ([sys.executable, "composer_job.py"], False),
        ([], False),
    ],
)
def test_launchers_are_recognized_by_their_command_lines(
    command: list[str], launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parent:
        def cmdline(self) -> list[str]:
            return command

    monkeypatch.setattr(psutil, "Process", lambda _: Parent())
    assert launcher_watchdog._is_launcher(1) is launches


def test_an_inaccessible_parent_is_not_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int) -> Any:
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr(psutil, "Process", gone)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not watch_launcher()
