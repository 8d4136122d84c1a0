"""Micro-batches bounded by their real tokens: which samples they hold, and the gradient of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.core import Callback, DataSpec, State
from composer.loggers import Logger
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from composer_speedups import Unpadding, split_by_tokens
from composer_speedups.data import token_microbatches
from composer_speedups.train.report import summary_table
from tests.helpers.common import Batches, Recorder, batch, final_weights, tiny_bert, trained
from tests.helpers.jobs import run
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


def test_tokens_of_all_texts_of_a_sample_count_and_without_a_mask_every_position() -> None:
    texts = {"input_ids": torch.ones(3, 2, 4), "attention_mask": torch.tensor([[[1, 1, 0, 0], [1, 0, 0, 0]]] * 3)}
    assert [len(part["input_ids"]) for part in split_by_tokens(6)(texts, 3)] == [2, 1]
    assert [len(part["input_ids"]) for part in split_by_tokens(8)({"input_ids": torch.ones(3, 4)}, 3)] == [2, 1]


def test_with_a_mask_of_pairs_of_tokens_every_position_counts() -> None:
    """Sums of its rows would be numbers of pairs."""
    ids, pairs = torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 1, 4, 4)
    parts = split_by_tokens(8)({"input_ids": ids, "attention_mask": pairs}, 3)
    assert [len(part["input_ids"]) for part in parts] == [2, 1]


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        split_by_tokens(0)
    with pytest.raises(ValueError, match="needs a mapping with input_ids, not Tensor"):
        split_by_tokens(4)(torch.ones(2), 2)
    with pytest.raises(ValueError, match="a list of 2 entries does not fit a batch of 3 samples"):
        split_by_tokens(4)({**batch([4, 4, 4]), "names": ["a", "b"]}, 3)


class Start(Callback):
    """Keeps the model and the random generator's state before the first forward pass, and counts micro-batches."""

    def __init__(self) -> None:
        self.model: Any = None
        self.random: Any = None
        self.rows: list[int] = []

    def before_forward(self, state: State, logger: Logger) -> None:
        if self.model is None:
            self.model, self.random = copy.deepcopy(state.model.model), torch.get_rng_state()
        self.rows.append(len(state.batch["labels"]))


def train(bound: int | None, *algorithms: Any, dropout: float = 0.0) -> tuple[Any, Recorder, Start]:
    recorder, start = Recorder(), Start()
    batches = [batch(LENGTHS, seed=1), batch([4, 4, 20, 4], seed=2)]
    split = None if bound is None else split_by_tokens(bound)
    trainer = trained(
        algorithms,
        model=tiny_bert(dropout=dropout),
        callbacks=[recorder, start],
        train_dataloader=DataSpec(
            DataLoader(Batches(batches), batch_size=None),
            split_batch=split,
            get_num_samples_in_batch=lambda b: len(b["labels"]),
        ),
        max_duration="2ba",
    )
    return trainer, recorder, start


@pytest.mark.filterwarnings("ignore:Cannot split tensor of length:UserWarning")  # of the whole batch, by Composer
@pytest.mark.parametrize("algorithms", [(), (Unpadding(8),)], ids=["plain", "unpadding"])
def test_gradients_are_those_of_the_whole_batch_in_ones_own_trainer(algorithms: tuple[Any, ...]) -> None:
    whole, parts = train(None), train(28, *copy.deepcopy(algorithms))
    assert (whole[2].rows, parts[2].rows) == ([7, 4], [3, 4, 3, 1])
    assert_near(parts[1].losses, whole[1].losses, what="losses")
    assert_near(parts[1].first_gradients, whole[1].first_gradients, what="gradients")
    assert_near(final_weights(parts[0]), final_weights(whole[0]), what="weights")


def test_with_dropout_the_gradient_is_the_mean_over_samples_of_the_micro_batches() -> None:
    _, recorder, start = train(28, dropout=0.3)
    model, samples = start.model.train(), batch(LENGTHS, seed=1)
    torch.set_rng_state(start.random)
    for rows in (slice(0, 3), slice(3, 7)):
        piece = {name: tensor[rows] for name, tensor in samples.items()}
        (model(**piece).loss * len(piece["labels"]) / 7).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_near(recorder.first_gradients, expected, what="gradients")


QUICK = ["trainer.device=cpu", "model.dropout=0", "trainer.max_duration=3ba", "trainer.eval_batches=1"]
QUICK += ["optimizer.eps=1e-3", "scheduler.name=constant", "algorithms.sdpa_attention=null", "algorithms.unpadding={}"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", [["model.class_weights=[1.0,9.0]"], ["model.task=mlm"]], ids=["class weights", "mlm"])
def test_train_py_counts_each_micro_batch_by_its_weight(job: list[str]) -> None:
    """On two ranks, the numbers of micro-batches differ."""
    whole = run(*QUICK, *job, "run_name=whole")
    sizes: list[list[int]] = []
    group = token_microbatches._group

    def recorded(*arguments: Any) -> list[int]:
        sizes.append(group(*arguments))
        return sizes[-1]

    def split(name: str) -> tuple[dict[str, Any], list[list[int]]]:
        sizes.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_microbatches, "_group", recorded)
            return run(*QUICK, *job, "trainer.microbatch_tokens=60", f"run_name={name}"), list(sizes)

    def train_on_ranks() -> tuple[dict[str, Any], dict[str, Any], list[list[int]]]:
        return run(*QUICK, *job, "run_name=whole-ranks"), *split("ranks")

    parts, batches = split("parts")
    (whole_ranks, ranks, first), (_, _, second) = on_ranks(train_on_ranks)
    assert len(batches) == len(first) == len(second) == 3
    assert any(len(sizes) > 1 for sizes in batches)
    assert any(len(here) != len(there) for here, there in zip(first, second, strict=True)), (first, second)
    for name, report, reference in (("parts", parts, whole), ("ranks", ranks, whole_ranks)):
        assert report["metrics"]["train_loss"] == pytest.approx(reference["metrics"]["train_loss"], rel=1e-5), name
        stock = load_file(f"runs/{reference['run_name']}/model/model.safetensors")
        assert_near(load_file(f"runs/{name}/model/model.safetensors"), stock, what=name)
        assert report["training"]["tokens"] == whole["training"]["tokens"], name
    assert "with at most 60 real tokens, chosen by the config" in summary_table(parts, "runs")


@pytest.mark.gpu
def test_on_a_gpu_losses_are_read_early_and_equal_those_of_whole_batches() -> None:
    job = [
        "model.dropout=0",
        "trainer.max_duration=4ba",
        "optimizer.eps=1e-3",
        "scheduler.name=constant",
        "export=false",
    ]
    job += ["algorithms.sdpa_attention=null", "algorithms.unpadding={}", "algorithms.early_loss={}"]
    whole, parts = run(*job, "run_name=whole"), run(*job, "trainer.microbatch_tokens=60", "run_name=parts")
    assert parts["metrics"]["train_loss"] == pytest.approx(whole["metrics"]["train_loss"], rel=1e-3)
    for name in ("unpadding", "early_loss"):
        assert parts["algorithms"][name]["engaged"], name
