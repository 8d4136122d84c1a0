"""Share each batch between ranks so that all have nearly the same number of tokens and do not wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler

Integers = npt.NDArray[Any]


class BalancedSampler(DistributedSampler[int]):
    """Shuffles the epoch, cuts it into batches, and deals out the samples of each batch to the ranks by length.

    Samples are dealt from the longest to the shortest, back and forth: 0 1 1 0 0 1 … with two ranks. The ranks' shares
    have the same number of samples and nearly the same number of tokens, and the batch as a whole is the one that a
    single process would draw. Each rank's samples keep their random order, so its micro-batches are random.

    The order depends only on the seed and the epoch, so a resumed run continues it. Every sample occurs once per epoch.
    An incomplete batch comes last, or is dropped with ``drop_last``. All ranks yield the same number of samples: if the
    last batch cannot be divided evenly, its first samples are repeated, as in
    :class:`torch.utils.data.DistributedSampler`. Composer recognizes the sampler by that base class and calls
    ``set_epoch``.

    Args:
        lengths: Tokens of each sample, (samples,).
        batch_size: Samples per batch over all ranks; a multiple of ``ranks``. Each rank's DataLoader uses a batch size
            of ``batch_size // ranks``.
        ranks, rank: Number of processes that share a batch, and the index of this one.
        seed: Seed of the shuffling.
        drop_last: Drop the last, incomplete batch.

    Raises:
        ValueError: ``batch_size`` is not a multiple of ``ranks``.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Integers,
        batch_size: int,
        *,
        ranks: int = 1,
        rank: int = 0,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if batch_size % ranks:
            raise ValueError(f"batch_size must be a multiple of the {ranks} ranks, not {batch_size}")
        super().__init__(lengths, ranks, rank, shuffle=True, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.lengths, self.batch_size = np.asarray(lengths), batch_size
        whole, rest = divmod(len(self.lengths), batch_size)
        self.num_samples = whole * batch_size // ranks + (0 if drop_last else -(-rest // ranks))
        self.total_size = self.num_samples * ranks

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).numpy()
        batches, rest = np.split(order, [len(order) // self.batch_size * self.batch_size])
        mine = self._share(self.arranged(batches.reshape(-1, self.batch_size), generator))
        if len(rest) and not self.drop_last:
            even = np.resize(rest, -(-len(rest) // self.num_replicas) * self.num_replicas)
            mine = np.concatenate([mine, self._share(even[None])])
        return iter(mine.tolist())

    def arranged(self, batches: Integers, generator: torch.Generator) -> Integers:
        """The epoch's complete batches, (batches, samples), in training order."""
        return batches

    def _share(self, batches: Integers) -> Integers:
        ranks, rank = self.num_replicas, self.rank
        if ranks == 1:
            return batches.ravel()
        count, size = batches.shape
        falling = np.argsort(-self.lengths[batches], axis=1, kind="stable").reshape(count, size // ranks, ranks)
        places = np.concatenate([falling[:, ::2, rank], falling[:, 1::2, ranks - 1 - rank]], axis=1)
        return np.take_along_axis(batches, np.sort(places, axis=1), axis=1).ravel()
