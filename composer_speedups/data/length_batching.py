"""Batches of samples with similar lengths, in which every sample still occurs once per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from composer_speedups.distributed.balanced_sampling import BalancedSampler, Integers


class LengthGroupedSampler(BalancedSampler):
    """Shuffles the epoch, cuts it into pools of several batches, sorts each pool by length, cuts it into batches, and
    shuffles the batches.

    An incomplete batch is not sorted and comes last, or is dropped with ``drop_last``; its samples are random.
    Everything else is as in :class:`.BalancedSampler`.

    Args:
        lengths: Tokens of each sample, (samples,).
        batch_size: Samples per batch over all ranks; a multiple of ``ranks``.
        pool: Number of batches that are sorted together. Larger pools give less padding, and batches that are less like
            independent draws.
        widths: The lengths to sort by, (samples,), if they differ from ``lengths``: those of the longest of several
            texts.
        **settings: Arguments of :class:`.BalancedSampler`.

    Raises:
        ValueError: ``pool`` is below 1, or the ranks cannot share a batch.
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
