"""Batches of reviews of like length, drawn so that every review still comes once an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from composer_speedups.distributed.balanced_sampling import BalancedSampler, Integers

__all__ = ["LengthGroupedSampler"]


class LengthGroupedSampler(BalancedSampler):
    """The epoch is shuffled and cut into pools of some batches; each pool is sorted by length and cut into batches;
    then the batches are shuffled.

    What does not fill a batch is left unsorted and comes last, or is left out with ``drop_last``: either way a random
    draw. All else is as in :class:`.BalancedSampler`.

    Args:
        lengths: Tokens of each review, (reviews,).
        batch_size: Reviews a batch, over all ranks together; a multiple of ``ranks``.
        pool: Batches that are sorted together. More is less padding, and batches less like independent draws.
        widths: What they are sorted by, (reviews,), where that is not ``lengths``: the longest text of several.
        **settings: Those of :class:`.BalancedSampler`.

    Raises:
        ValueError: ``pool`` below 1, or a batch that the ranks cannot share.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Integers,
        batch_size: int,
        pool: int,
        widths: Sequence[int] | Integers | None = None,
        **settings: Any,
    ) -> None:
        if pool < 1:
            raise ValueError(f"pool must be at least 1, not {pool}")
        super().__init__(lengths, batch_size, **settings)
        self.pool, self.widths = pool, self.lengths if widths is None else np.asarray(widths)

    def arranged(self, batches: Integers, generator: torch.Generator) -> Integers:
        pools = [batches[start : start + self.pool].ravel() for start in range(0, len(batches), self.pool)]
        by_length = [pool[np.argsort(self.widths[pool], kind="stable")] for pool in pools]
        grouped = np.concatenate([batches.ravel()[:0], *by_length]).reshape(batches.shape)
        return grouped[torch.randperm(len(batches), generator=generator).numpy()]
