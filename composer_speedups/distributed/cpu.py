"""torch's CPU threads with several ranks on a host."""

from __future__ import annotations

import os
from functools import cache

import torch
from composer.utils import dist


def share_cores(*, computes: bool, at_most: int | None = None) -> None:
    """Set the number of threads of torch's CPU operations, permanently for this process.

    torch uses a thread per core for every operation on more than 32,768 elements, such as the token ids of 129 samples
    of 256 tokens. With one rank per GPU the threads of all ranks compete, and copying a batch takes longer than
    computing it. If ``OMP_NUM_THREADS`` is set, nothing is changed. Call it before the Trainer is built.

    Args:
        computes: Whether the training step runs on the CPU. If so, the ranks of this node share its cores; otherwise
            one thread copies the batches.
        at_most: Upper limit for each rank; None for no limit. Small models are as fast with one thread on idle cores,
            and several times as fast when other processes use the cores too, because every operation waits for the
            slowest of its threads.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    share = max(1, _at_first() // dist.get_local_world_size())
    limit = at_most if computes else 1
    torch.set_num_threads(share if limit is None else min(share, limit))


@cache
def _at_first() -> int:
    return torch.get_num_threads()
