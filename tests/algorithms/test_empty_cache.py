"""Emptying the allocator's cache: when, how often, and that reserved memory goes down."""

from __future__ import annotations

import pytest
import torch

from composer_speedups import EmptyCache, apply_empty_cache
from composer_speedups.core.errors import NotEngagedError, TechniqueError
from tests.helpers.common import make_trainer, plain_batches


@pytest.mark.pins
def test_it_is_refused_without_a_gpu_and_the_function_returns_nothing_freed() -> None:
    with pytest.raises(TechniqueError, match=r"empty_cache: .*needs a CUDA GPU"):
        make_trainer([EmptyCache()])
    with pytest.raises(ValueError, match="every must be at least 1"):
        EmptyCache(every=0)
    if not torch.cuda.is_initialized():
        assert apply_empty_cache() == 0


def test_a_run_in_which_it_never_ran_is_detected() -> None:
    technique = EmptyCache()
    with pytest.raises(NotEngagedError, match="never emptied"):
        technique.verify(make_trainer().state)


@pytest.mark.gpu
def test_the_function_gives_memory_back() -> None:
    torch.cuda.empty_cache()
    block = torch.empty(2**30, device="cuda", dtype=torch.uint8)  # fits into no block that others have left
    del block
    assert apply_empty_cache() >= 2**30
    assert apply_empty_cache() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("every", "times"), [(1, 4), (2, 3), (100, 1)])
def test_it_runs_after_the_first_batch_and_then_at_its_interval(every: int, times: int) -> None:
    technique = EmptyCache(every=every)
    trainer = make_trainer([technique], batches=plain_batches(4), gpu=True)
    trainer.fit()
    trainer.close()
    assert technique.evidence["times_emptied"] == times
