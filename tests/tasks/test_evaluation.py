"""Evaluation on one rank does not synchronize with the device in each batch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from torch import Tensor

import composer_speedups.train.trainer
from tests.helpers.jobs import run


def test_composer_does_not_count_samples_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composer reads the count with ``item()`` if the sampler is a DistributedSampler, which one rank does not need."""
    readers: set[str] = set()
    item = Tensor.item

    def seen(self: Tensor) -> Any:
        readers.add(sys._getframe(1).f_code.co_name)
        return item(self)

    monkeypatch.setattr(Tensor, "item", seen)
    report = run("trainer.max_duration=1ba")
    assert 0 <= report["metrics"]["accuracy"] <= 1
    assert "_accumulate_time_across_ranks" in readers
    assert "_eval_loop" not in readers


class _Strict(Callback):
    """Raise on synchronizations from the second to the sixth evaluation batch."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.EVAL_BEFORE_FORWARD and state.eval_timestamp.batch.value > 1:
            torch.cuda.set_sync_debug_mode("error")
        elif event == Event.EVAL_BATCH_END and state.eval_timestamp.batch.value >= 6:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_evaluation_does_not_synchronize_with_the_gpu_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    build = composer_speedups.train.trainer.build_trainer

    def strict(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        trainer.state.callbacks.append(_Strict())
        return trainer

    monkeypatch.setattr(composer_speedups.train.trainer, "build_trainer", strict)
    techniques = (
        "sdpa_attention=null",
        "mixed_precision={dtype: bf16}",
        "unpadding={}",
        "fused_layers={}",
        "early_loss={}",
    )
    overrides = [f"algorithms.{technique}" for technique in techniques]
    try:
        report = run("trainer.max_duration=1ba", "data.eval_samples=64", "trainer.device=gpu", *overrides)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 <= report["metrics"]["accuracy"] <= 1
