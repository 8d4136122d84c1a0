"""Run train.py in forked processes that are killed at a chosen point and started again."""

from __future__ import annotations

import itertools
import os
import pkgutil
import random
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forks import Fork

Point = dict[str, Any]  # {"at": one of POINTS or "random", "count": at which call, "signal": the signal sent}


def run_cases(folder: Path, cases: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Run cases ``{"name", "arguments", "points"}``: train.py until it is stopped at each point, then to its end.

    A random point lies within the time of the last run of the case named ``like``. Returns the exit statuses of each
    case, negative for signals; ``<name>.out`` has the output.
    """
    folder.mkdir(exist_ok=True)
    statuses_of: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for case in cases:
            statuses = statuses_of.setdefault(case["name"], [])
            for point in case.get("points", []):
                if point["at"] == "random":
                    moment = random.Random(point["count"]).uniform(0.05, 0.8) * seconds.get(case.get("like", ""), 2.0)
                    point = {**point, "count": moment}
                statuses.append(_run(case, point))
            started = time.monotonic()
            if statuses[-1:] != [0]:  # otherwise a random moment came after the end of the run
                statuses.append(_run(case, None))
            seconds[case["name"]] = time.monotonic() - started
    return statuses_of


def _run(case: dict[str, Any], point: Point | None) -> int:
    fork = Fork(partial(_train, case["arguments"], point), f"{case['name']}.run")
    if point is not None and point["at"] == "random" and not fork.ends_within(point["count"]):
        os.kill(fork.process.pid, point.get("signal", signal.SIGKILL))
    done = fork.wait()
    with Path(f"{case['name']}.out").open("a") as out:
        out.write(done.stderr)
    return done.status


def _train(arguments: list[str], point: Point | None) -> None:
    import torch

    from composer_speedups.train import application
    from composer_speedups.train.cli import exit_codes

    torch.set_num_threads(1)
    if point is not None and point["at"] == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (point["largest_file"], point["largest_file"]))
    elif point is not None and point["at"] != "random":
        _install(point["at"], point["count"], lambda: os.kill(os.getpid(), point.get("signal", signal.SIGKILL)))
    with exit_codes():
        application.main(arguments)


def _at_call(owner: Any, name: str, count: int, act: Callable[[], None], *, before: bool) -> None:
    """Act at the ``count``-th call of a function, before it or after it."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        due = next(calls) == count
        if due and before:
            act()
        result = original(*args, **kwargs)
        if due and not before:
            act()
        return result

    setattr(owner, name, wrapped)


def _in_write(count: int, act: Callable[[], None]) -> None:
    """Act in the middle of the ``count``-th checkpoint's bytes."""
    import torch
    from composer.utils import checkpoint

    original, calls = checkpoint._write_checkpoint_file, itertools.count(1)

    def halfway(state_dict: dict[str, Any], filename: str) -> None:
        original(state_dict, filename)
        if next(calls) == count:
            os.truncate(filename, os.path.getsize(filename) // 2)
            act()
            torch.save(state_dict, filename)  # for signals that do not kill at once

    checkpoint._write_checkpoint_file = halfway


# Kills at calls of a function: its owner, imported only when the kill is installed, its name, and whether before it.
CALLS: dict[str, tuple[str, str, bool]] = {
    "data": ("composer_speedups.data.loader:Pad", "__call__", True),
    "step": ("torch:Tensor", "backward", True),
    "batch_end": ("composer_speedups.callbacks.throughput:ThroughputMonitor", "batch_end", True),
    "eval": ("composer:Trainer", "_eval_loop", False),
    "rename": ("composer_speedups.train.checkpoints", "publish", True),
    "symlink": ("composer_speedups.train.checkpoints:WholeCheckpointSaver", "_point_at", True),
    "rotate": ("composer_speedups.train.checkpoints:WholeCheckpointSaver", "_remove_older", True),
    "export": ("composer_speedups.tasks.export", "model_of", False),
    "report": ("composer_speedups.train.report", "write_json", True),
}


def _install(point: str, count: int, act: Callable[[], None]) -> None:
    if point == "write":
        return _in_write(count, act)
    owner, name, before = CALLS[point]
    return _at_call(pkgutil.resolve_name(owner), name, count, act, before=before)


POINTS = ("data", "step", "batch_end", "eval", "write", "rename", "symlink", "rotate", "export", "report")
