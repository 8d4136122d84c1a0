"""Emptying the allocator's cache: the interval."""

from __future__ import annotations

import pytest

from composer_speedups import EmptyCache
from tests.helpers.common import plain_batches, trained


@pytest.mark.gpu
@pytest.mark.parametrize(("every", "times"), [(1, 4), (2, 3), (100, 1)])
def test_it_runs_after_the_first_batch_and_then_at_its_interval(every: int, times: int) -> None:
    technique = EmptyCache(every=every)
    trained([technique], batches=plain_batches(4), gpu=True)
    assert technique.evidence["times_emptied"] == times
