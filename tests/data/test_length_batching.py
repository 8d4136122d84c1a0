"""LengthGroupedSampler: every sample once per epoch, reproducible on resume, and shuffled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from composer_speedups.core.errors import ConfigError
from composer_speedups.data.flat import FlatTokens, Ragged
from composer_speedups.data.length_batching import LengthGroupedSampler
from composer_speedups.data.loader import Pad, build_data
from composer_speedups.tasks.classification import Classification
from composer_speedups.train.config.schema import DataConfig
from tests.helpers.jobs import assert_resumes_exactly, run

LENGTHS = np.random.default_rng(0).integers(3, 200, size=1003)


def sampler(**kwargs: Any) -> LengthGroupedSampler:
    settings: dict[str, Any] = {"batch_size": 16, "pool": 8, "seed": 5, **kwargs}
    return LengthGroupedSampler(LENGTHS, settings.pop("batch_size"), settings.pop("pool"), **settings)


def batches(indices: list[int], size: int = 16) -> list[list[int]]:
    return [indices[i : i + size] for i in range(0, len(indices), size)]


@pytest.mark.pins
def test_every_sample_comes_once_per_epoch_and_a_short_batch_comes_last() -> None:
    for epoch in range(3):
        drawn = sampler()
        drawn.set_epoch(epoch)
        order = list(drawn)
        assert sorted(order) == list(range(1003))
        assert len(order) == len(drawn)
        assert [len(b) for b in batches(order)] == [16] * 62 + [11]
    dropped = list(sampler(drop_last=True))
    assert len(dropped) == len(set(dropped)) == 62 * 16 == len(sampler(drop_last=True))


@pytest.mark.pins
def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        torch.rand(3)  # the global generator must not matter
        drawn = sampler(seed=seed)
        drawn.set_epoch(epoch)
        return list(drawn)

    assert order(5, 1) == order(5, 1)
    assert order(5, 1) != order(5, 0)
    assert order(5, 1) != order(6, 1)
    together = [{frozenset(b) for b in batches(order(5, epoch))} for epoch in (0, 1)]
    assert not together[0] & together[1], "the batches are new ones, not only reordered"


@pytest.mark.pins
def test_batches_have_similar_lengths_and_are_not_ordered_by_length() -> None:
    def widths(pool: int, epoch: int) -> list[int]:
        drawn = sampler(pool=pool)
        drawn.set_epoch(epoch)
        return [int(LENGTHS[b].max()) for b in batches(list(drawn))[:-1]]

    grouped, plain = (np.array([widths(pool, epoch) for epoch in range(40)]) for pool in (8, 1))
    real = 62 * 16 * LENGTHS.mean()
    padding = [16 * w.sum(1).mean() - real for w in (grouped, plain)]
    assert padding[0] < 0.25 * padding[1]
    means = grouped.mean(0)  # by the batch's position in the epoch
    assert abs(means[:20].mean() - means[-20:].mean()) < 10, "long samples gather at neither end of an epoch"
    assert np.abs(means - means.mean()).max() < 40


def test_a_pool_of_one_batch_is_plain_shuffling() -> None:
    order = list(sampler(pool=1))
    spread = [np.ptp(LENGTHS[b]) for b in batches(order)[:-1]]
    assert min(spread) > 90


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="pool must be at least 1, not 0"):
        sampler(pool=0)
    with pytest.raises(ConfigError, match=r"data\.length_batching saves no padding .* set data\.padding=longest"):
        run("data.padding=max_length", "data.length_batching=4")


@pytest.mark.pins
def test_getitems_gives_the_batch_that_its_rows_give() -> None:
    columns = {"input_ids": [list(range(n)) for n in (3, 1, 7, 2, 5)], "labels": [0, 1, 1, 0, 1]}
    flat = FlatTokens(Dataset.from_dict(columns))
    for indices in ([4, 0, 2], [1], [3, 3]):
        rows = {name: [values[i] for i in indices] for name, values in columns.items()}
        pad = Pad(9, 8, longest=True, multiple=4)
        torch.testing.assert_close(pad(flat.__getitems__(indices)), pad(Ragged.of(rows)), rtol=0, atol=0)


def builtin(**kwargs: Any) -> DataConfig:
    settings: dict[str, Any] = {"padding": "longest", "pad_to_multiple_of": 1, **kwargs}
    return DataConfig(
        source="builtin", tokenizer="wordpiece", vocab_size=300, train_samples=200, eval_samples=20, batch_size=8,
        max_length=128, length_scale=0.3, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
def test_length_batching_halves_the_padding_of_built_in_reviews(workers: int) -> None:
    padding = {}
    for pool in (None, 8):
        config = builtin(length_batching=pool, workers=workers)
        data = build_data(config, Classification(), model_name="", on_gpu=False, seed=3)
        masks = [b["attention_mask"] for b in data.train.dataloader]
        assert sum(len(m) for m in masks) == 200
        padding[pool] = 1 - sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)
        assert data.train.get_num_tokens_in_batch({"input_ids": masks[0], "attention_mask": masks[0]}) > 0
    assert padding[8] < 0.5 * padding[None]


def test_the_shuffle_depends_on_the_seed_of_the_run() -> None:
    def labels(seed: int) -> list[int]:
        data = build_data(builtin(), Classification(), model_name="", on_gpu=False, seed=seed)
        return torch.cat([b["input_ids"].sum(1) for b in data.train.dataloader]).tolist()

    assert labels(1) == labels(1) != labels(2)


@pytest.mark.exhaustive
def test_a_resumed_run_ends_where_the_uninterrupted_one_does() -> None:
    settings = ["trainer.max_duration=2ep", "data.length_batching=3", "checkpoint.interval=4ba"]
    assert_resumes_exactly(*settings, checkpoints=["ep0-ba4", "ep1-ba8"])
