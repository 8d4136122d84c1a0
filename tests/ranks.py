"""Ranks as forked children: they need no imports of their own, which take ten seconds a process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["on_ranks"]


def on_ranks(function: Callable[[], Any], ranks: int = 2, timeout: float = 240) -> list[Any]:
    """What ``function`` returns on each of some gloo ranks, which share this process's memory as it is now.

    Every rank has ended when it returns; one that raised fails the test with its traceback.
    """
    if torch.cuda.is_available():
        pytest.skip("forks ranks, which a process that has used CUDA cannot")
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        processes = [
            context.Process(target=_rank, args=(function, rank, ranks, folder / f"rank{rank}.pkl"))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
    found = [folder / f"rank{rank}.pkl" for rank in range(ranks)]
    results = [pickle.loads(path.read_bytes()) if path.exists() else (False, "killed") for path in found]
    faults = [f"rank {rank}: {result}" for rank, (fine, result) in enumerate(results) if not fine]
    assert not faults, "\n".join(faults)
    return [result for _, result in results]


def _rank(function: Callable[[], Any], rank: int, ranks: int, path: Path) -> None:
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "NODE_RANK": "0",
    }
    try:
        torch.set_num_threads(1)
        # They meet in a file, which Composer would not have them do: a port that was free may be taken by now.
        store, patience = f"file://{path.parent}/store", timedelta(seconds=120)
        torch.distributed.init_process_group("gloo", store, patience, ranks, rank)
        result = (True, function())
    except BaseException:
        result = (False, traceback.format_exc())
    path.with_suffix(".tmp").write_bytes(pickle.dumps(result))
    path.with_suffix(".tmp").rename(path)
    sys.stdout.flush()
    os._exit(0)  # nothing of the test runner's is closed twice
