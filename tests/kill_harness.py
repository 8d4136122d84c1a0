"""train.py in forked children of one warm process, killed at a chosen point and started again.

Run as ``python -m tests.kill_harness FOLDER < cases.json``: it imports everything once, trains nothing itself, and
forks one child a run. A child writes ``<run>.out`` and ends as ``train.py`` does.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

__all__ = ["POINTS", "Point", "run_cases"]

Point = dict[str, Any]  # {"at": one of POINTS or "random", "count": which time, "signal": what it gets}


def run_cases(folder: Path, cases: list[dict[str, Any]], timeout: float) -> list[dict[str, Any]]:
    """Run cases one after the other in a fresh warm process; each is ``{"name", "arguments", "points"}``.

    A case is one run of train.py for each of its points, which is stopped there, and one more to the end. Returns for
    each the exit statuses in order (negative: the signal that killed it), and the seconds that the last one took. A
    random point's moment lies within those of the case that ``like`` names.
    """
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_harness", str(folder)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _after_calls(owner: Any, name: str, count: int, act: Callable[[], None], *, before: bool) -> None:
    """Act at the ``count``-th call of a function, before it or after it."""
    original, seen = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if before and seen[0] == count:
            act()
        result = original(*args, **kwargs)
        if not before and seen[0] == count:
            act()
        return result

    setattr(owner, name, wrapped)


def _in_write(count: int, act: Callable[[], None]) -> None:
    """Act in the middle of the ``count``-th checkpoint's bytes."""
    import torch
    from composer.utils import checkpoint

    original, seen = checkpoint._write_checkpoint_file, [0]

    def halfway(state_dict: dict[str, Any], filename: str) -> None:
        seen[0] += 1
        original(state_dict, filename)
        if seen[0] == count:
            os.truncate(filename, os.path.getsize(filename) // 2)
            act()
            torch.save(state_dict, filename)  # a signal that does not kill at once

    checkpoint._write_checkpoint_file = halfway


def _install(at: str, count: int, act: Callable[[], None]) -> None:
    import torch
    from composer import Trainer

    from composer_speedups.callbacks.throughput import ThroughputMonitor
    from composer_speedups.checkpoints import saver
    from composer_speedups.data.loader import Pad

    if at == "data":
        _after_calls(Pad, "__call__", count, act, before=True)
    elif at == "step":
        _after_calls(torch.Tensor, "backward", count, act, before=True)
    elif at == "batch_end":
        _after_calls(ThroughputMonitor, "_end_batch", count, act, before=True)
    elif at == "eval":
        _after_calls(Trainer, "_eval_loop", count, act, before=False)
    elif at == "write":
        _in_write(count, act)
    elif at == "rename":
        _after_calls(saver, "publish", count, act, before=True)
    elif at == "symlink":
        _after_calls(saver.WholeCheckpointSaver, "_point_at", count, act, before=True)
    elif at == "rotate":
        _after_calls(saver.WholeCheckpointSaver, "_remove_older", count, act, before=True)
    elif at == "export":
        from composer_speedups import export

        _after_calls(export, "model_of", count, act, before=False)
    elif at == "report":
        from composer_speedups import report

        _after_calls(report, "write_atomically", count, act, before=True)
    else:
        raise ValueError(at)


POINTS = ("data", "step", "batch_end", "eval", "write", "rename", "symlink", "rotate", "export", "report")


def _child(arguments: list[str], out: Path, point: Point | None) -> None:
    """Never returns."""
    import train
    from composer_speedups.cli import exit_codes

    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 1
    try:
        if point is not None and point.get("largest_file"):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (point["largest_file"], point["largest_file"]))
        elif point is not None and point["at"] != "random":
            _install(point["at"], point["count"], lambda: os.kill(os.getpid(), point.get("signal", signal.SIGKILL)))
        with exit_codes():
            train.main(arguments)
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(arguments: list[str], out: Path, point: Point | None) -> int:
    sys.stdout.flush()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(arguments, out, point)
    if point is not None and point["at"] == "random":
        while time.monotonic() < started + point["count"] and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.005)
        try:
            os.kill(child, point.get("signal", signal.SIGKILL))
        except ProcessLookupError:
            return 0  # it had ended
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path) -> None:
    import torch

    import train  # noqa: F401
    from composer_speedups import report, runs, trainer  # noqa: F401
    from composer_speedups.data import build_data  # noqa: F401
    from composer_speedups.export import export_model  # noqa: F401
    from composer_speedups.startup import look_at_cpu

    torch.set_num_threads(1)
    look_at_cpu().join()  # a process that each child would start
    cases, results = json.load(sys.stdin), []
    os.chdir(folder)
    seconds: dict[str, float] = {}
    for case in cases:
        out, statuses = Path(f"{case['name']}.out"), []
        for point in case.get("points", []):
            if point["at"] == "random":  # a moment within the time that such a run takes
                moment = random.Random(point["count"]).uniform(0.05, 0.8) * seconds.get(case.get("like", ""), 2.0)
                point = {**point, "count": moment}
            statuses.append(_run(case["arguments"], out, point))
        started = time.monotonic()
        if statuses[-1:] != [0]:  # else a random moment came too late, and there is nothing to go on with
            statuses.append(_run(case["arguments"], out, None))
        seconds[case["name"]] = time.monotonic() - started
        results.append({"name": case["name"], "statuses": statuses, "seconds": seconds[case["name"]]})
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
