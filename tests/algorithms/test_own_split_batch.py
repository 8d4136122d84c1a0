"""A DataSpec with a ``split_batch`` of one's own, which knows only the entries of its own batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer.core import DataSpec
from torch.utils.data import DataLoader

from composer_speedups import Unpadding
from tests.helpers.common import Batch, Batches, Recorder, final_weights, plain_batches, trained
from tests.reference.tolerance import assert_near


def by_tensor_split(batch: Batch, size: int) -> list[Batch]:
    parts = {name: tensor.split(size) for name, tensor in batch.items()}
    return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]


def odd_rows_first(batch: Batch, size: int) -> list[Batch]:
    order = torch.tensor([1, 3, 0, 2])
    return [{name: tensor[rows] for name, tensor in batch.items()} for rows in order.split(size)]


def train(split: Callable[[Batch, int], list[Batch]], *algorithms: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    recorder = Recorder()
    loader = DataLoader(Batches(plain_batches(2)), batch_size=None)
    trainer = trained(
        algorithms,
        callbacks=[recorder],
        train_dataloader=DataSpec(loader, split_batch=split, get_num_samples_in_batch=lambda b: len(b["labels"])),  # type: ignore[arg-type]
        max_duration="2ba",
        device_train_microbatch_size=2,
    )
    return final_weights(trainer), recorder.losses


@pytest.mark.parametrize("split", [by_tensor_split, odd_rows_first])
def test_unpadding_trains_with_a_split_that_knows_only_tensors(split: Callable[[Batch, int], list[Batch]]) -> None:
    expected, losses = train(split)
    found, own = train(split, Unpadding(8))
    assert_near(own, losses, what="losses")
    assert_near(found, expected, what="weights")
