"""torch's threads on the host: as many as its work there is worth."""

from __future__ import annotations

import os
from functools import cache

import torch
from composer.utils import dist

__all__ = ["share_cores"]


def share_cores(*, computes: bool) -> None:
    """Set the threads of torch's operations on the CPU, in this process, for good.

    torch wakes a thread for each core wherever more than 32,768 numbers are touched, the token ids of 129 reviews
    among them, and each rank does: with as many ranks as GPUs they are in one another's way, and copying a batch takes
    longer than computing it. Where ``OMP_NUM_THREADS`` is set, it stands.

    Args:
        computes: Whether the training step computes on the host, so that the ranks of this node share its cores;
            otherwise one thread copies the batches.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    share = max(1, _at_first() // dist.get_local_world_size())
    torch.set_num_threads(share if computes else 1)


@cache
def _at_first() -> int:
    return torch.get_num_threads()
