"""The host beside the GPUs: torch's threads on it, and Python's garbage collection, for which all other ranks wait."""

from __future__ import annotations

import gc
import os
from functools import cache

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

__all__ = ["FreezeGarbage", "share_cores"]


def share_cores(*, computes: bool) -> None:
    """Set the threads of torch's operations on the CPU, in this process, for good.

    torch wakes a thread for each core wherever more than 32,768 numbers are touched, the token ids of 129 reviews
    among them, and each rank does: with as many ranks as GPUs they are in one another's way, and copying a batch takes
    longer than computing it. Where ``OMP_NUM_THREADS`` is set, it stands. Call it before the Trainer is made.

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


class FreezeGarbage(Callback):
    """Takes all objects that exist when training starts out of Python's garbage collection, until the Trainer closes.

    Importing torch, Composer and transformers makes a million objects that live on. A full collection looks at all of
    them, for 0.4 s in some training step, and all other ranks wait for the one that collects. What training itself
    makes is collected as before. Where something is frozen already, as ``train.py`` freezes what it has imported,
    nothing is changed.

    ``Trainer(callbacks=[FreezeGarbage()], …)``. Source: ``gc.freeze``.
    """

    def __init__(self) -> None:
        self._froze = False

    def fit_start(self, state: State, logger: Logger) -> None:
        if gc.get_freeze_count() == 0:
            gc.collect()  # so that no garbage is kept
            gc.freeze()
            self._froze = True

    def close(self, state: State, logger: Logger) -> None:
        if self._froze:
            gc.unfreeze()
            self._froze = False
