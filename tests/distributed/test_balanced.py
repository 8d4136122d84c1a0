"""BalancedSampler: ranks share one process's batches, equally in samples and nearly equally in tokens."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from composer_speedups.data.batching import LengthGroupedSampler
from composer_speedups.distributed.balanced_sampling import BalancedSampler

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(5.3, 0.6, size=5003).astype(int) + 3, 256)


def shares(
    ranks: int, batch_size: int = 64, *, rows: int = 5003, pool: int | None = None, epoch: int = 1, **kwargs: Any
) -> list[np.ndarray[Any, Any]]:
    """Return the order of each rank, from a LengthGroupedSampler if ``pool`` is given."""
    make: Any = BalancedSampler if pool is None else functools.partial(LengthGroupedSampler, pool=pool)
    samplers = [make(LENGTHS[:rows], batch_size, ranks=ranks, rank=r, seed=5, **kwargs) for r in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    orders = [np.array(list(sampler), dtype=int) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(order) for order in orders] == [len(orders[0])] * ranks
    return orders


@pytest.mark.pins
@pytest.mark.parametrize("epoch", [0, 3])
def test_one_process_draws_the_order_of_torchs_distributed_sampler(epoch: int) -> None:
    theirs: DistributedSampler[int] = DistributedSampler(LENGTHS, 1, 0, shuffle=True, seed=5)  # type: ignore[arg-type]
    theirs.set_epoch(epoch)
    assert shares(1, epoch=epoch)[0].tolist() == list(theirs)


@pytest.mark.pins
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("rows", "pool"), [(5003, None), (5003, 8), (5000, 8), (63, 8)])
def test_ranks_share_the_batches_of_one_process_without_overlap(
    rows: int, pool: int | None, ranks: int, drop_last: bool
) -> None:
    settings: dict[str, Any] = {"rows": rows, "pool": pool, "drop_last": drop_last}
    whole, parts = shares(1, **settings)[0], shares(ranks, **settings)
    assert len(whole) == (rows // 64 * 64 if drop_last else rows)
    size = 64 // ranks
    for start in range(0, len(whole), 64):
        batch = whole[start : start + 64].tolist()
        shared = [int(i) for part in parts for i in part[start // ranks : start // ranks + size]]
        extra = -len(batch) % ranks
        assert len(shared) == len(batch) + extra, "rows are repeated only to fill up the last batch"
        assert sorted(shared) == sorted([*batch, *batch[:extra]])
        for part in parts:
            positions = [batch.index(i) for i in part[start // ranks : start // ranks + size]]
            assert positions == sorted(positions) or extra, "in the order in which they were drawn"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shares_are_nearly_equal_in_tokens(ranks: int) -> None:
    def excess(parts: list[np.ndarray[Any, Any]]) -> float:
        """Return the mean over batches of (tokens of the longest share / mean tokens of all shares - 1)."""
        tokens = np.array([LENGTHS[part].reshape(-1, 128).sum(1) for part in parts])
        return float((tokens.max(0) / tokens.mean(0) - 1).mean())

    parts = shares(ranks, 128 * ranks, drop_last=True)
    plain: list[DistributedSampler[int]] = [DistributedSampler(LENGTHS, ranks, r, seed=5) for r in range(ranks)]  # type: ignore[arg-type]
    at_random = [np.array(list(one))[: len(parts[0])] for one in plain]
    assert excess(at_random) > 0.01
    assert excess(parts) < 0.002


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be a multiple of the 3 ranks, not 64"):
        BalancedSampler(LENGTHS, 64, ranks=3)
