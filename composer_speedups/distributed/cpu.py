"""Host settings that matter with several ranks: torch's CPU threads and Python's garbage collection."""

from __future__ import annotations

import gc
import os
from functools import cache

import torch
from composer.core import Callback, State
from composer.loggers import Logger
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


class FreezeGarbage(Callback):
    """Excludes all objects that exist when training starts from Python's garbage collection, until the Trainer closes.

    Importing torch, Composer and transformers creates a million permanent objects. A full collection visits all of
    them, which takes 0.4 s in some training step while all other ranks wait. Objects that training creates are
    collected as usual. If objects are already frozen, as by ``train.py``, nothing is changed.

    ``Trainer(callbacks=[FreezeGarbage()], …)``. Source: ``gc.freeze``.
    """

    def __init__(self) -> None:
        self._froze = False

    def fit_start(self, state: State, logger: Logger) -> None:
        if gc.get_freeze_count() == 0:
            gc.collect()  # so that no garbage is frozen
            gc.freeze()
            self._froze = True

    def close(self, state: State, logger: Logger) -> None:
        if self._froze:
            gc.unfreeze()
            self._froze = False
