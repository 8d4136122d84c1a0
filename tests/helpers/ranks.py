"""What a function returns on each of some gloo ranks."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forks import Fork

__all__ = ["on_ranks"]


def on_ranks(function: Callable[[], Any], ranks: int = 2, timeout: float = 240) -> list[Any]:
    """What ``function`` returns on each of some gloo ranks.

    Every rank has ended when it returns; one that raised fails the test with its traceback.
    """
    if torch.cuda.is_available():
        pytest.skip("ranks on the CPU, of a machine without a GPU")
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    found = [folder / f"rank{rank}.pkl" for rank in range(ranks)]
    forks = [
        Fork(
            partial(_rank, function, rank, ranks, found[rank]),
            f"{folder.name}-{rank}",
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
            NODE_RANK="0",
        )
        for rank in range(ranks)
    ]
    ends = [fork.wait(timeout) for fork in forks]
    faults = [f"rank {rank}: {end.stderr}" for rank, end in enumerate(ends) if end.status]
    assert not faults, "\n".join(faults)
    return [pickle.loads(path.read_bytes()) for path in found]


def _rank(function: Callable[[], Any], rank: int, ranks: int, path: Path) -> None:
    torch.set_num_threads(1)
    # They meet in a file, which Composer would not have them do: a port that was free may be taken by now.
    store, patience = f"file://{path.parent}/store", timedelta(seconds=120)
    torch.distributed.init_process_group("gloo", store, patience, ranks, rank)
    path.write_bytes(pickle.dumps(function()))
