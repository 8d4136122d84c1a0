"""A rank gets SIGTERM when its launcher ends; a process without a launcher keeps running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from composer_speedups.train import launcher_watchdog
from composer_speedups.train.launcher_watchdog import ending_with_launcher
from tests.conftest import ROOT
from tests.helpers.hangs import HANGS

# A process with a launcher's name, which starts a rank and waits.
_LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "rank.py"]).wait()
"""
# A rank that ends when its stdin is closed, or with status 5 on SIGTERM.
_RANK = """
import os, signal, sys
sys.path.insert(0, {root!r})
from composer_speedups.train.launcher_watchdog import ending_with_launcher
signal.signal(signal.SIGTERM, lambda *_: (print("told", file=sys.stderr), sys.exit(5)))
with ending_with_launcher() as ending:
    print(os.getpid(), ending, flush=True)
    sys.stdin.read()
"""


def started_by(name: str, **environment: str) -> tuple[subprocess.Popen[str], psutil.Process, bool]:
    """Start a process with that name; return it, its rank, and whether the rank ends with its launcher."""
    Path(name).write_text(_LAUNCHER)
    Path("rank.py").write_text(_RANK.format(root=str(ROOT)))
    cleared = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
    process = subprocess.Popen(
        [sys.executable, name],
        env={**cleared, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid, ends = process.stdout.readline().split()
    return process, psutil.Process(int(pid)), ends == "True"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_gets_sigterm_when_its_launcher_ends(how: signal.Signals) -> None:
    process, rank, ends = started_by("composer", LOCAL_RANK="0")
    assert ends
    assert rank.is_running(), "the rank runs as long as its launcher"
    process.send_signal(how)
    rank.wait(HANGS)
    told, explained = process.communicate()[1].splitlines()
    assert told == "told"
    assert explained == f"train.py: the launcher (process {process.pid}) ended before its ranks, so this rank stops"


def test_a_launcher_that_ends_during_the_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(os, "getppid", Mock(side_effect=[4321, 1, 4321]))
    monkeypatch.setattr(os, "kill", sent := Mock())
    monkeypatch.setattr(launcher_watchdog, "_is_launcher", lambda pid: pid == 4321)
    monkeypatch.setattr(launcher_watchdog, "ctypes", Mock())
    with ending_with_launcher():
        pass
    sent.assert_called_once_with(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("name", "environment", "killed"),
    [("composer", {}, True), ("start.sh", {"LOCAL_RANK": "0"}, True), ("composer", {"LOCAL_RANK": "0"}, False)],
)
def test_other_processes_outlive_their_parent_and_say_nothing(
    name: str, environment: dict[str, str], killed: bool
) -> None:
    """So does a rank whose launcher lives."""
    process, rank, ends = started_by(name, **environment)
    assert ends is not killed
    if killed:
        process.kill()
        process.wait()  # by then, the kernel would have sent the rank a signal
    assert rank.is_running()
    assert process.communicate(timeout=HANGS)[1] == ""  # closes stdin, which ends the rank


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
    monkeypatch.setattr(psutil, "Process", lambda _: Mock(cmdline=lambda: command))
    assert launcher_watchdog._is_launcher(1) is launches


def test_an_inaccessible_parent_is_not_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "Process", Mock(side_effect=psutil.NoSuchProcess(1)))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with ending_with_launcher() as ending:
        assert not ending
