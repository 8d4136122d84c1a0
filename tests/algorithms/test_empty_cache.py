"""Emptying the allocator's cache: the interval, and the memory released."""

from __future__ import annotations

import pytest
import torch

from composer_speedups import EmptyCache, apply_empty_cache
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from tests.helpers.common import make_trainer, plain_batches, trained


@pytest.mark.pins
def test_without_a_gpu_the_technique_is_refused_and_the_function_frees_nothing() -> None:
    with pytest.raises(TechniqueError, match=r"empty_cache: .*needs a CUDA GPU"):
        make_trainer([EmptyCache()])
    if not torch.cuda.is_initialized():
        assert apply_empty_cache() == 0


def test_a_cache_that_was_never_emptied_is_detected() -> None:
    technique = EmptyCache()
    with pytest.raises(NotEngagedError, match="never emptied"):
        technique.verify(make_trainer().state)


@pytest.mark.gpu
def test_the_function_releases_memory() -> None:
    torch.cuda.empty_cache()
    block = torch.empty(2**30, device="cuda", dtype=torch.uint8)  # too large for a cached block
    del block
    assert apply_empty_cache() >= 2**30
    assert apply_empty_cache() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("every", "times"), [(1, 4), (2, 3), (100, 1)])
def test_it_runs_after_the_first_batch_and_then_at_its_interval(every: int, times: int) -> None:
    technique = EmptyCache(every=every)
    trained([technique], batches=plain_batches(4), gpu=True)
    assert technique.evidence["times_emptied"] == times
