"""Batches of reviews of like length, drawn so that every review still comes once an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

__all__ = ["LengthGroupedSampler"]


class LengthGroupedSampler(DistributedSampler[int]):
    """The epoch is shuffled and cut into pools of some batches; each pool is sorted by length and cut into batches;
    then the batches are shuffled.

    The order depends on the seed and the epoch alone, so a resumed run goes on in it. Every review comes once an epoch.
    What does not fill a batch is left unsorted and comes last, or is left out with ``drop_last``: either way a random
    draw. All ranks yield equally many rows: where the last batch cannot be shared evenly, its first rows come twice,
    as in :class:`torch.utils.data.DistributedSampler`. Composer knows it by that class and calls ``set_epoch``.

    Args:
        lengths: Tokens of each review, (reviews,).
        batch_size: Reviews a batch, over all ranks together; a multiple of ``ranks``. The DataLoader takes
            ``batch_size // ranks`` of each rank.
        pool: Batches that are sorted together. More is less padding, and batches less like independent draws.
        ranks, rank: How many processes share a batch, and which one this is.
        seed: Seed of the shuffling.
        drop_last: Leave out the reviews that do not fill a batch.

    Raises:
        ValueError: ``pool`` below 1, or a batch that the ranks cannot share.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray[Any, Any],
        batch_size: int,
        pool: int,
        *,
        ranks: int = 1,
        rank: int = 0,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if pool < 1:
            raise ValueError(f"pool must be at least 1, not {pool}")
        if batch_size % ranks:
            raise ValueError(f"batch_size must be a multiple of the {ranks} ranks, not {batch_size}")
        super().__init__(lengths, ranks, rank, shuffle=True, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.lengths = np.asarray(lengths)
        self.batch_size, self.pool = batch_size, pool
        whole, rest = divmod(len(self.lengths), batch_size)
        self.num_samples = whole * batch_size // ranks + (0 if drop_last else -(-rest // ranks))
        self.total_size = self.num_samples * ranks

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).numpy()
        whole = len(order) // self.batch_size
        grouped, rest = np.split(order, [whole * self.batch_size])
        step = self.pool * self.batch_size
        pools = [grouped[start : start + step] for start in range(0, len(grouped), step)]
        ordered = [pool[np.argsort(self.lengths[pool], kind="stable")] for pool in pools]
        batches = np.concatenate([grouped[:0], *ordered]).reshape(whole, self.batch_size)
        batches = batches[torch.randperm(whole, generator=generator).numpy()]
        mine = batches[:, self.rank :: self.num_replicas].ravel()
        if len(rest) and not self.drop_last:
            shared = np.resize(rest, -(-len(rest) // self.num_replicas) * self.num_replicas)
            mine = np.concatenate([mine, shared[self.rank :: self.num_replicas]])
        return iter(mine.tolist())
