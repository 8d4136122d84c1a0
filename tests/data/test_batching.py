"""Micro-batches bounded by their real tokens, and batches of samples of similar lengths."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from composer.core import Callback, DataSpec, State
from composer.loggers import Logger
from datasets import Dataset
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from composer_speedups import Unpadding, split_by_tokens
from composer_speedups.data import batching
from composer_speedups.data.batching import LengthGroupedSampler
from composer_speedups.data.flat import FlatTokens, Ragged
from composer_speedups.data.loader import Pad, build_data
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.settings import DataConfig
from composer_speedups.train.report import summary_table
from tests.helpers.common import Batches, Recorder, batch, final_weights, tiny_bert, trained
from tests.helpers.jobs import assert_resumes_exactly, run
from tests.helpers.ranks import on_ranks
from tests.reference.tolerance import assert_near

LENGTHS = [9, 16, 3, 12, 5, 8, 2]


@pytest.mark.parametrize(
    ("bound", "samples", "sizes"),
    [
        (55, 7, [7]),
        (54, 7, [6, 1]),
        (28, 7, [3, 4]),
        (28, 2, [2, 2, 2, 1]),
        (10, 7, [1, 1, 1, 1, 1, 2]),  # samples of 16 and 12 tokens are above the bound
    ],
)
def test_consecutive_samples_are_split_at_the_bound(bound: int, samples: int, sizes: list[int]) -> None:
    whole: dict[str, Any] = {**batch(LENGTHS), "names": list("abcdefg"), "nested": {"row": torch.arange(7)}, "all": 3}
    parts = split_by_tokens(bound)(whole, samples)
    assert [len(part["labels"]) for part in parts] == sizes
    for name in ("input_ids", "attention_mask", "labels"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole[name])
    assert [name for part in parts for name in part["names"]] == whole["names"]
    assert torch.cat([part["nested"]["row"] for part in parts]).tolist() == list(range(7))
    assert {part["all"] for part in parts} == {3}


@pytest.mark.parametrize(
    ("bound", "shape", "mask"),
    [
        (6, (3, 2, 4), torch.tensor([[[1, 1, 0, 0], [1, 0, 0, 0]]] * 3)),  # all texts of a sample count
        (8, (3, 4), None),  # without a mask, every position counts
        (8, (3, 4), torch.ones(3, 1, 4, 4)),  # likewise: sums of rows of a mask of pairs would be numbers of pairs
    ],
)
def test_the_tokens_of_a_sample(bound: int, shape: tuple[int, ...], mask: Any) -> None:
    whole = {"input_ids": torch.ones(shape)} | ({} if mask is None else {"attention_mask": mask})
    assert [len(part["input_ids"]) for part in split_by_tokens(bound)(whole, 3)] == [2, 1]


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        split_by_tokens(0)
    with pytest.raises(ValueError, match="needs a mapping with input_ids, not Tensor"):
        split_by_tokens(4)(torch.ones(2), 2)
    with pytest.raises(ValueError, match="a list of 2 entries does not fit a batch of 3 samples"):
        split_by_tokens(4)({**batch([4, 4, 4]), "names": ["a", "b"]}, 3)


class Rows(Callback):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def before_forward(self, state: State, logger: Logger) -> None:
        self.rows.append(len(state.batch["labels"]))


def train(bound: int | None, *algorithms: Any) -> tuple[Any, Recorder, list[int]]:
    recorder, seen = Recorder(), Rows()
    loader = DataLoader(Batches([batch(LENGTHS, seed=1), batch([4, 4, 20, 4], seed=2)]), batch_size=None)
    split = None if bound is None else split_by_tokens(bound)
    data = DataSpec(loader, split_batch=split, get_num_samples_in_batch=lambda b: len(b["labels"]))
    callbacks, model = [recorder, seen], tiny_bert(dropout=0.0)
    trainer = trained(algorithms, model=model, callbacks=callbacks, train_dataloader=data, max_duration="2ba")
    return trainer, recorder, seen.rows


@pytest.mark.filterwarnings("ignore:Cannot split tensor of length:UserWarning")  # of the whole batch, by Composer
@pytest.mark.parametrize("algorithms", [(), (Unpadding(8),)], ids=["plain", "unpadding"])
def test_gradients_are_those_of_the_whole_batch_in_ones_own_trainer(algorithms: tuple[Any, ...]) -> None:
    whole, parts = train(None), train(28, *copy.deepcopy(algorithms))
    assert (whole[2], parts[2]) == ([7, 4], [3, 4, 3, 1])
    assert_near(parts[1].losses, whole[1].losses, what="losses")
    assert_near(parts[1].first_gradients, whole[1].first_gradients, what="gradients")
    assert_near(final_weights(parts[0]), final_weights(whole[0]), what="weights")


QUICK = ["model.dropout=0", "optimizer.eps=1e-3", "scheduler.name=constant"]
QUICK += ["algorithms.sdpa_attention=null", "algorithms.unpadding={}"]


@pytest.mark.parametrize(
    "job", ["model.class_weights=[1.0,9.0]", pytest.param("model.task=mlm", marks=pytest.mark.exhaustive)]
)
def test_train_py_counts_each_micro_batch_by_its_weight(job: str) -> None:
    """On two ranks, the numbers of micro-batches differ."""
    jobs = [*QUICK, "trainer.device=cpu", "trainer.max_duration=3ba", "trainer.eval_batches=1", job]
    sizes: list[list[int]] = []
    cut = batching._cut

    def recorded(*arguments: Any) -> Any:
        microbatches = cut(*arguments)
        sizes.append([len(samples) for samples in microbatches])
        return microbatches

    def both(suffix: str) -> tuple[dict[str, Any], dict[str, Any], list[list[int]]]:
        whole = run(*jobs, f"run_name=whole{suffix}")
        sizes.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batching, "_cut", recorded)
            return whole, run(*jobs, "trainer.microbatch_tokens=60", f"run_name=parts{suffix}"), [*sizes]

    one = both("")
    two, other = on_ranks(lambda: both("-ranks"))
    assert len(one[2]) == len(two[2]) == len(other[2]) == 3
    assert any(len(sizes) > 1 for sizes in one[2])
    assert any(len(here) != len(there) for here, there in zip(two[2], other[2], strict=True))
    for suffix, (whole, parts, _) in (("", one), ("-ranks", two)):
        assert parts["metrics"]["train_loss"] == pytest.approx(whole["metrics"]["train_loss"], rel=1e-5), suffix
        stock, split = (load_file(f"runs/{name}{suffix}/model/model.safetensors") for name in ("whole", "parts"))
        assert_near(split, stock, what=suffix)
        assert parts["training"]["tokens"] == one[0]["training"]["tokens"], suffix
    assert "with at most 60 real tokens, chosen by the config" in summary_table(one[1], "runs")


@pytest.mark.gpu
def test_on_a_gpu_losses_are_read_early_and_equal_those_of_whole_batches() -> None:
    job = [*QUICK, "trainer.max_duration=4ba", "export=false", "algorithms.early_loss={}"]
    whole, parts = run(*job, "run_name=whole"), run(*job, "trainer.microbatch_tokens=60", "run_name=parts")
    assert parts["metrics"]["train_loss"] == pytest.approx(whole["metrics"]["train_loss"], rel=1e-3)
    for name in ("unpadding", "early_loss"):
        assert parts["algorithms"][name]["engaged"], name


# Batches of similar lengths

WIDTHS = np.random.default_rng(0).integers(3, 200, size=1003)


def epoch_of(epoch: int, pool: int = 8, seed: int = 5, **settings: Any) -> list[list[int]]:
    torch.rand(3)  # the global generator must not matter
    sampler = LengthGroupedSampler(WIDTHS, 16, pool, seed=seed, **settings)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert len(order) == len(sampler)
    return [order[i : i + 16] for i in range(0, len(order), 16)]


@pytest.mark.pins
def test_every_sample_comes_once_per_epoch_in_an_order_of_seed_and_epoch_alone() -> None:
    first, second = epoch_of(0), epoch_of(1)
    for batches in (first, second):
        assert sorted(chain(*batches)) == list(range(1003))
        assert [len(samples) for samples in batches] == [16] * 62 + [11]
    assert first == epoch_of(0)
    assert first != epoch_of(0, seed=6)
    assert not {*map(frozenset, first)} & {*map(frozenset, second)}, "the batches are new ones, not only reordered"
    dropped = [*chain(*epoch_of(0, drop_last=True))]
    assert len(dropped) == len({*dropped}) == 62 * 16


@pytest.mark.pins
def test_batches_have_similar_lengths_and_are_not_ordered_by_length() -> None:
    def widths(pool: int, epoch: int) -> list[int]:
        return [int(WIDTHS[samples].max()) for samples in epoch_of(epoch, pool)[:-1]]

    grouped, plain = (np.array([widths(pool, epoch) for epoch in range(40)]) for pool in (8, 1))
    real = 62 * 16 * WIDTHS.mean()
    padding = [16 * w.sum(1).mean() - real for w in (grouped, plain)]
    assert padding[0] < 0.25 * padding[1]
    means = grouped.mean(0)  # by the batch's position in the epoch
    assert abs(means[:20].mean() - means[-20:].mean()) < 10, "long samples gather at neither end of an epoch"
    assert np.abs(means - means.mean()).max() < 40


@pytest.mark.pins
def test_getitems_gives_the_batch_that_its_rows_give() -> None:
    columns = {"input_ids": [list(range(n)) for n in (3, 1, 7, 2, 5)], "labels": [0, 1, 1, 0, 1]}
    flat = FlatTokens(Dataset.from_dict(columns))
    for indices in ([4, 0, 2], [1], [3, 3]):
        rows = {name: [values[i] for i in indices] for name, values in columns.items()}
        pad = Pad(9, 8, longest=True, multiple=4)
        torch.testing.assert_close(pad(flat.__getitems__(indices)), pad(Ragged.of(rows)), rtol=0, atol=0)


def test_the_shuffle_depends_on_the_seed_of_the_run() -> None:
    config = DataConfig(
        source="builtin", tokenizer="wordpiece", vocab_size=300, train_samples=40, eval_samples=20, batch_size=8,
        length_scale=0.1,
    )  # fmt: skip

    def rows(seed: int) -> list[int]:
        data = build_data(config, Classification(), model_name="", on_gpu=False, seed=seed)
        return torch.cat([b["input_ids"].sum(1) for b in data.train.dataloader]).tolist()

    assert rows(1) == rows(1) != rows(2)


@pytest.mark.exhaustive
def test_a_resumed_run_ends_where_the_uninterrupted_one_does() -> None:
    settings = ["trainer.max_duration=2ep", "data.length_batching=3", "checkpoint.interval=4ba"]
    assert_resumes_exactly(*settings, checkpoints=["ep0-ba4", "ep1-ba8"])
