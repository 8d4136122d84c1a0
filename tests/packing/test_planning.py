"""Packing in a Composer Trainer: which batches are packed, with which heads, masks and batches that change."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from composer.core import DataSpec
from composer.models import ComposerModel
from torch import Tensor
from torch.utils.data import DataLoader

from composer_speedups import FusedLayers, TorchCompile, Unpadding
from tests.helpers.common import Batch, Batches, batch, final_weights, fit_and_close, make_trainer, tiny_bert, trained
from tests.helpers.models import tiny_model
from tests.helpers.unpadded import compared, observed, pair, way
from tests.reference.tolerance import assert_near


def test_a_mask_that_is_repeated_for_every_row_stays_padded() -> None:
    inputs = batch([9, 16, 3, 12], 16)
    inputs["attention_mask"] = inputs["attention_mask"][1:2]
    assert compared(*pair(), lambda module: module(**inputs).loss) == "padded"


class TwoHeads(ComposerModel):
    """A head that uses real tokens only, and one that reads each row's first slot."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.rows = tiny_model("bert", "tokens"), tiny_bert()

    def forward(self, batch: Batch) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        mask = batch["attention_mask"][..., None]
        by_token = (self.tokens(**inputs).logits * mask).sum(1) / mask.sum(1)
        return by_token.sum(-1, keepdim=True) + self.rows(**inputs).logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch["labels"])


class TwoTexts(ComposerModel):
    """A bi-encoder whose sides have one text or several for each sample, with masks of one shape."""

    def __init__(self, encoders: int = 1) -> None:
        super().__init__()
        self.bert = tiny_bert().bert
        self.other = tiny_bert(seed=1).bert if encoders == 2 else self.bert

    def forward(self, batch: Batch) -> Tensor:
        sides = []
        for side, encoder in (("", self.bert), ("_b", self.other)):
            ids, mask = (batch[name + side].flatten(0, -2) for name in ("input_ids", "attention_mask"))
            hidden = encoder(ids, mask).last_hidden_state * mask[..., None]
            sides.append(hidden.sum(1) / mask.sum(1, keepdim=True))
        return sides[0] @ sides[1].T

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, torch.arange(len(outputs), device=outputs.device))


def sides(texts: int) -> list[Batch]:
    batches = []
    for seed in range(3):
        one, two = batch([9, 16, 3, 7], seed=seed), batch([5, 2, 16, 8], seed=50 + seed)
        given = {**one, "input_ids_b": two["input_ids"], "attention_mask_b": two["attention_mask"]}
        shape = (4 // texts, texts, -1) if texts > 1 else (4, -1)
        batches.append({name: values.view(shape) for name, values in given.items() if name != "labels"})
    return batches


@pytest.mark.parametrize(
    ("model", "batches", "more"),
    [
        (TwoHeads, [batch([9, 16, 3, 12], seed=seed) for seed in range(2)], []),
        (TwoTexts, sides(1), []),
        (TwoTexts, sides(2), []),
        (lambda: TwoTexts(2), sides(1), [lambda: FusedLayers(check="never")]),
        pytest.param(TwoTexts, sides(2), [lambda: TorchCompile(backend="eager")], marks=pytest.mark.exhaustive),
    ],
    ids=["two heads", "two masks of one shape", "with several texts", "two encoders, fused", "compiled"],
)
def test_a_trainer_counts_each_mask_on_the_cpu(model: Any, batches: list[Batch], more: list[Any]) -> None:
    given = copy.deepcopy(batches)
    expected = trained(model=model(), batches=batches)
    techniques: list[Any] = [Unpadding(8, check="never"), *(build() for build in more)]
    trainer = make_trainer(techniques, model=model(), batches=batches)
    ran = observed(lambda: fit_and_close(trainer))
    assert_near(final_weights(trainer), final_weights(expected), what="weights")
    compiled = any(technique.name == "torch_compile" for technique in techniques)
    assert bool(ran["counted_in_the_call"]) == compiled, "compiled code cannot tell two views of one shape apart"
    assert "masks_counted_on_the_device" not in techniques[0].evidence
    assert [entry.keys() for entry in batches] == [entry.keys() for entry in given], "the loader's own batches"


def choices() -> list[Batch]:
    """Batches of several choices for each sample, the second with a choice that has no token."""
    batches = [batch([5, 3, 6, 1, 2, 4]), batch([5, 3, 6, 0, 2, 4]), batch([5, 3, 6, 2, 2, 4], seed=1)]
    for inputs in batches:
        inputs |= {name: inputs[name].view(3, 2, 6) for name in ("input_ids", "attention_mask")}
        inputs["labels"] = torch.tensor([0, 1, 1])
    return batches


def with_left_padding() -> list[Batch]:
    """The second batch cannot be packed for the one of two heads that reads each row's first slot."""
    batches = [batch([9, 16, 3, 12]), batch([9, 16, 3, 12], seed=1)]
    batches[1]["attention_mask"] = batches[1]["attention_mask"].flip(1)
    return batches


@pytest.mark.parametrize(
    ("model", "batches"), [(TwoHeads, with_left_padding()), (partial(tiny_model, "bert", "choice"), choices())]
)
def test_a_batch_whose_padding_a_head_reads_stays_padded(model: Any, batches: list[Batch]) -> None:
    technique, expected = Unpadding(8), trained(model=model(), batches=batches)
    actual = trained([technique], model=model(), batches=batches)
    assert_near(final_weights(actual), final_weights(expected), what="weights")
    assert technique.evidence["micro_batches_kept_padded"] == 1


def train(split: Any, algorithms: Any = ()) -> tuple[Any, Any]:
    batches = [batch([9, 4, 12, 7], seed=seed) for seed in range(3)]
    for whole in batches:
        whole["labels"] = (whole["input_ids"] % 2).masked_fill(whole["attention_mask"] == 0, -100)
    spec = DataSpec(
        DataLoader(Batches(batches), batch_size=None),
        split_batch=split,
        get_num_samples_in_batch=lambda whole: len(whole["labels"]),
    )
    sizes = {"max_duration": "3ba", "device_train_microbatch_size": 2}
    trainer = make_trainer(algorithms, model=tiny_model("bert", "tokens"), train_dataloader=spec, **sizes)
    ran = observed(lambda: fit_and_close(trainer))
    return final_weights(trainer), ran


def by_name(whole: Batch, size: int) -> list[Batch]:
    """A split that knows the names of its entries."""
    names = ("input_ids", "attention_mask", "labels")
    return [{name: whole[name][start : start + size] for name in names} for start in (0, size)]


def by_tensor(whole: Batch, size: int) -> list[Batch]:
    parts = {name: tensor.split(size) for name, tensor in whole.items()}
    return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]


def odd_rows_first(whole: Batch, size: int) -> list[Batch]:
    order = torch.tensor([1, 3, 0, 2])
    return [{name: tensor[rows] for name, tensor in whole.items()} for rows in order.split(size)]


@pytest.mark.parametrize(("split", "counted"), [(by_name, 6), (by_tensor, 0), (odd_rows_first, 0)])
def test_a_split_of_ones_own_divides_the_lengths_or_they_are_counted_on_the_device(split: Any, counted: int) -> None:
    technique = Unpadding(8)
    (actual, ran), (expected, _) = train(split, [technique]), train(split)
    assert_near(actual, expected, what="weights")
    assert (way(ran), ran["counted_in_the_call"]) == ("packed", counted)
    assert technique.evidence.get("masks_counted_on_the_device", 0) == counted
