"""Packing in a Composer Trainer: which batches are packed, with which heads, masks and batches that change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.core import DataSpec
from composer.models import ComposerModel
from torch import Tensor
from torch.utils.data import DataLoader

from composer_speedups import FusedLayers, TorchCompile, Unpadding
from tests.helpers.common import Batch, Batches, batch, final_weights, make_trainer, tiny_bert, trained
from tests.helpers.models import tiny_model
from tests.helpers.unpadded import compared, observed, pair, way
from tests.reference.tolerance import assert_near


@pytest.mark.parametrize("mask", ["none", "of one row"])
def test_a_batch_without_its_own_mask_is_computed_as_in_the_untouched_model(mask: str) -> None:
    inputs = batch([9, 16, 3, 12], 16)
    inputs["attention_mask"] = inputs["attention_mask"][1:2]  # BERT repeats it for every row
    if mask == "none":
        del inputs["attention_mask"]
    assert compared(*pair(), lambda module: module(**inputs).loss) == ("packed" if mask == "none" else "padded")


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
    ran = observed(trainer.fit)
    trainer.close()
    assert_near(final_weights(trainer), final_weights(expected), what="weights")
    compiled = any(technique.name == "torch_compile" for technique in techniques)
    assert bool(ran["counted_in_the_call"]) == compiled, "compiled code cannot tell two views of one shape apart"
    assert "masks_counted_on_the_device" not in techniques[0].evidence
    assert [entry.keys() for entry in batches] == [entry.keys() for entry in given], "the loader's own batches"


def test_a_batch_stays_padded_if_one_of_two_encoders_cannot_pack_it() -> None:
    batches = [batch([9, 16, 3, 12]), batch([9, 16, 3, 12], seed=1)]
    batches[1]["attention_mask"] = batches[1]["attention_mask"].flip(1)  # rows begin with padding
    expected, technique = trained(model=TwoHeads(), batches=batches), Unpadding(8)
    actual = trained([technique], model=TwoHeads(), batches=batches)
    assert_near(final_weights(actual), final_weights(expected), what="weights")
    assert technique.evidence["micro_batches_kept_padded"] == 1


@pytest.mark.parametrize("trainer", [False, True])
def test_a_choice_without_tokens_is_computed_as_in_the_untouched_model(trainer: bool) -> None:
    """The head reads the first slot of every choice."""
    batches = [batch([5, 3, 6, 0, 2, 4]), batch([5, 3, 6, 1, 2, 4]), batch([5, 3, 6, 2, 2, 4], seed=1)]
    for inputs in batches:
        inputs |= {name: inputs[name].view(3, 2, 6) for name in ("input_ids", "attention_mask")}
        inputs["labels"] = torch.tensor([0, 1, 1])
    reference, model = pair("bert", "choice")
    if not trainer:
        assert compared(reference, model, lambda module: module(**batches[0]).loss) == "padded"
        return
    technique = Unpadding(8)
    order = [batches[1], batches[0], batches[2]]
    expected = trained(model=tiny_model("bert", "choice"), batches=order)
    actual = trained([technique], model=tiny_model("bert", "choice"), batches=order)
    assert_near(final_weights(actual), final_weights(expected), what="weights")
    assert technique.evidence["micro_batches_kept_padded"] == 1


def as_tokens(inputs: Batch) -> Batch:
    return {**inputs, "labels": (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)}


def train(change: Any = None, split: Any = None, algorithms: Any = ()) -> tuple[Any, Any]:
    """Train a token classifier on batches that a function changes on the device."""
    batches = [as_tokens(batch([9, 4, 12], seed=seed)) for seed in range(3)]
    spec = DataSpec(
        DataLoader(Batches(batches), batch_size=None),
        microbatch_transforms=change,
        split_batch=split or (lambda whole, size: [dict(whole)]),
        get_num_samples_in_batch=lambda whole: len(whole["labels"]),
    )
    trainer = make_trainer(algorithms, model=tiny_model("bert", "tokens"), train_dataloader=spec, max_duration="3ba")
    try:
        ran = observed(trainer.fit)
        return final_weights(trainer), ran
    finally:
        trainer.close()


def shorten(inputs: Batch) -> Batch:
    mask = inputs["attention_mask"] * (torch.arange(12) < 3)
    return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def label_padding(inputs: Batch) -> Batch:
    return {**inputs, "labels": inputs["labels"].clamp(min=0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [(shorten, "changed after its tokens were counted"), (label_padding, "give padding the label -100")],
)
def test_a_batch_that_changes_on_the_device_is_an_error(change: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        train(change, algorithms=[Unpadding(8, check="never")])


def own_split(whole: Batch, size: int) -> list[Batch]:
    """A split that knows the names of its entries."""
    names = ("input_ids", "attention_mask", "labels")
    return [{name: whole[name][start : start + 2] for name in names} for start in (0, 2)]


def test_a_split_of_ones_own_that_drops_the_lengths_is_counted_on_the_device() -> None:
    technique = Unpadding(8)
    (actual, ran), (expected, _) = train(split=own_split, algorithms=[technique]), train(split=own_split)
    assert_near(actual, expected, what="weights")
    assert (way(ran), ran["counted_in_the_call"]) == ("packed", 6)
    assert technique.evidence["masks_counted_on_the_device"] >= 1
