"""Functions run on each of some gloo ranks, and results that pytest-xdist's workers share."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.helpers.forks import Done, Fork
from tests.helpers.hangs import HANGS


def on_ranks(function: Callable[[], Any], ranks: int = 2) -> list[Any]:
    """Return what ``function`` returns on each rank. A rank that raised fails the test with its traceback."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))

    def save() -> None:
        (folder / os.environ["RANK"]).write_bytes(pickle.dumps(function()))

    ends = ends_of_ranks(save, ranks)
    faults = [f"rank {rank}: {end.stderr}" for rank, end in enumerate(ends) if end.status]
    assert not faults, "\n".join(faults)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks)]


def ends_of_ranks(function: Callable[[], Any], ranks: int = 2) -> list[Done]:
    """Run ``function`` on each rank; return how each of them ended."""
    if torch.cuda.is_available():
        pytest.skip("ranks on the CPU, of a machine without a GPU")
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    forks = [
        Fork(
            partial(_rank, function, rank, ranks, folder / "store"),
            f"{folder.name}-{rank}",
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
            NODE_RANK="0",
        )
        for rank in range(ranks)
    ]
    return [fork.wait() for fork in forks]


def _rank(function: Callable[[], Any], rank: int, ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    # They meet in a file, which Composer would not have them do: a port that was free may be taken by now.
    torch.distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=HANGS), ranks, rank)
    function()


def once_per_run(compute: Callable[[], Any], name: str, factory: pytest.TempPathFactory) -> Any:
    """Return ``compute()``, which only the first worker of a test run calls; the others wait for its result."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return compute()
    path = factory.getbasetemp().parent / f"{name}-{run}.pkl"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_bytes(pickle.dumps(compute()))
        return pickle.loads(path.read_bytes())
