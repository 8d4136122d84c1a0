"""Each batch shared by the ranks so that all have nearly equally many tokens, and none waits long for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler

__all__ = ["BalancedSampler"]

Integers = npt.NDArray[Any]


class BalancedSampler(DistributedSampler[int]):
    """The epoch is shuffled and cut into batches; the reviews of each are dealt out to the ranks by length.

    From the longest to the shortest, there and back: with two ranks 0 1 1 0 0 1 …, so that shares are equal in reviews
    and nearly in tokens, while the batch as a whole is what one process would draw. A rank's reviews keep the order of
    the draw: parts of its share are random ones.

    The order depends on the seed and the epoch alone, so a resumed run goes on in it. Every review comes once an epoch.
    What does not fill a batch comes last, or is left out with ``drop_last``. All ranks yield equally many rows: where
    the last batch cannot be shared evenly, its first rows come twice, as in
    :class:`torch.utils.data.DistributedSampler`. Composer knows it by that class and calls ``set_epoch``.

    Args:
        lengths: Tokens of each review, (reviews,).
        batch_size: Reviews a batch, over all ranks together; a multiple of ``ranks``. The DataLoader takes
            ``batch_size // ranks`` of each rank.
        ranks, rank: How many processes share a batch, and which one this is.
        seed: Seed of the shuffling.
        drop_last: Leave out the reviews that do not fill a batch.

    Raises:
        ValueError: A batch that the ranks cannot share.
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
        """The epoch's whole batches, (batches, reviews), in the order to train on."""
        return batches

    def _share(self, batches: Integers) -> Integers:
        ranks, rank = self.num_replicas, self.rank
        if ranks == 1:
            return batches.ravel()
        count, size = batches.shape
        falling = np.argsort(-self.lengths[batches], axis=1, kind="stable").reshape(count, size // ranks, ranks)
        places = np.concatenate([falling[:, ::2, rank], falling[:, 1::2, ranks - 1 - rank]], axis=1)
        return np.take_along_axis(batches, np.sort(places, axis=1), axis=1).ravel()
