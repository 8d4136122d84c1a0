"""What the throughput monitor keeps of each batch, as numbers that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from composer.utils import dist

__all__ = ["Batch", "gather_batches", "own_batches"]


@dataclass
class Batch:
    """One training batch of one rank. Times in seconds."""

    index: int
    samples: int
    tokens: int  # real ones
    slots: int  # positions, padding included
    flops: int
    data: float  # waiting for the DataLoader
    step: float  # transfer, forward, backward, optimizer
    steady: bool

    @property
    def seconds(self) -> float:
        return self.data + self.step


def gather_batches(batches: Sequence[Batch]) -> list[list[tuple[Any, ...]]]:
    """The batches of every rank, by rank; every rank must call. Only one rank's callbacks go into a checkpoint."""
    return dist.all_gather_object([astuple(batch) for batch in batches])


def own_batches(gathered: Sequence[Sequence[Sequence[Any]]]) -> list[Batch]:
    """This rank's batches of :func:`gather_batches`; none where another number of ranks trained them."""
    if len(gathered) != dist.get_world_size():
        return []
    return [Batch(*row) for row in gathered[dist.get_global_rank()]]
