"""Packing: which batches are packed, and whose counts are already known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.models import ComposerModel
from torch import Tensor

from composer_speedups import TorchCompile, Unpadding, apply_unpadding, plan_unpadding
from composer_speedups.algorithms.unpadding import host_counts
from composer_speedups.packing import planning
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.planning import Packing, PlannedBatch
from composer_speedups.packing.rows import row_counts
from tests.helpers.common import Batch, batch, final_weights, make_trainer, tiny_bert, trained
from tests.helpers.models import tiny_model
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
    ("view", "counts"),
    [
        (lambda mask: mask.flatten(0, -2)[1:3], [1, 3]),
        (lambda mask: mask.flatten(0, -2).split(3)[1], [1]),
        (lambda mask: mask[1].view(2, 3), [3, 1]),
        (lambda mask: mask.flatten(0, -2)[1:3].clone(), None),
        (lambda mask: mask.flatten(0, -2)[::2], None),
        (lambda mask: mask.flatten()[1:7].view(2, 3), None),
        (lambda mask: mask.flatten().view(6, 2), None),
    ],
)
def test_the_counts_of_a_chunk_are_those_of_its_rows(view: Any, counts: list[int] | None) -> None:
    whole = MASK.view(2, 2, 3).clone()
    packing = Packing(None, 8, known_counts=((whole, [2, 1, 3, 1]),))
    assert packing._known_counts_of(view(whole)) == counts


def test_a_batch_of_several_texts_is_planned_for_the_view_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code cannot see whose view a mask is. It takes the only planned mask of the same size."""
    planned = [PlannedBatch(MASK.view(2, 2, 3).clone(), None, None) for _ in range(2)]
    first, other = (batch.mask.flatten(0, 1) for batch in planned)
    packing = Packing(None, 8, planned=tuple(planned))

    def found(mask: Tensor, packing: Packing = packing) -> list[int]:
        chosen = packing._planned_for(mask, mask.shape)
        return [number for number, batch in enumerate(planned) if any(batch is one for one in chosen)]

    assert [found(mask) for mask in (first, other, first[:2], first.clone())] == [[0], [1], [], []]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    alone = Packing(None, 8, planned=(planned[1],))
    assert [found(mask, alone) for mask in (other, first.clone(), first[:2])] == [[1], [1], []]
    assert found(first) == [], "either could be meant"


@pytest.mark.parametrize("mask", ["none", "of one row"])
def test_a_batch_without_its_own_mask_is_computed_as_in_the_untouched_model(mask: str) -> None:
    reference = tiny_bert()
    model: Any = copy.deepcopy(reference)
    apply_unpadding(model)
    inputs = batch([9, 16, 3, 12], 16)
    inputs["attention_mask"] = inputs["attention_mask"][1:2]  # BERT repeats it for every row
    if mask == "none":
        del inputs["attention_mask"]
    for network in (reference, model):
        network(**inputs).loss.backward()
    assert_near(gradients(model), gradients(reference))
    assert unpadded_encoders(model)[0].ran == ("unpadded" if mask == "none" else "padded")


class TwoHeads(ComposerModel):
    """A head that uses real tokens only, and one that reads each row's first slot."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rows = tiny_model("bert", "tokens"), tiny_bert()

    def forward(self, batch: Batch) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        mask = batch["attention_mask"][..., None]
        by_token = (self.tokens(**inputs).logits * mask).sum(1) / mask.sum(1)
        return by_token.sum(-1, keepdim=True) + self.rows(**inputs).logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch["labels"])


def test_a_batch_stays_padded_if_one_of_two_encoders_cannot_pack_it() -> None:
    later = batch([9, 16, 3, 12], seed=1)
    later["attention_mask"] = later["attention_mask"].flip(1)  # rows begin with padding
    batches = [batch([9, 16, 3, 12]), later]
    torch.manual_seed(0)
    expected = trained(model=TwoHeads(), batches=batches)
    torch.manual_seed(0)
    trainer = make_trainer([Unpadding(8)], model=TwoHeads(), batches=batches)
    trainer.fit()
    trainer.close()
    assert_near(final_weights(trainer), final_weights(expected), what="weights")


def test_the_tokens_of_a_batchs_mask_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evidence and both encoders use one count."""
    counted: list[Tensor] = []

    def count(mask_BS: Tensor) -> list[int]:
        counted.append(mask_BS.clone())
        return row_counts(mask_BS)

    for module in (host_counts, planning):
        monkeypatch.setattr(module, "row_counts", count)
    batches = [batch([5, 16, 9], seed=seed) for seed in range(3)]
    technique = Unpadding(8, check="never")
    trained([technique], model=TwoHeads(), batches=batches)
    assert technique.evidence["encoders"] == 2
    torch.testing.assert_close(counted, [inputs["attention_mask"] for inputs in batches])


def choices(seed: int = 0) -> Batch:
    """Three samples of two choices; the second choice of one of them has no tokens."""
    rows = batch([5, 3, 6, 0, 2, 4], seed=seed)
    ids, mask = (rows[name].view(3, 2, 6) for name in ("input_ids", "attention_mask"))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1])}


@pytest.mark.parametrize("way", ["forward", "plan", "Trainer"])
def test_a_choice_without_tokens_is_computed_as_in_the_untouched_model(way: str) -> None:
    """The head reads the first slot of every choice."""
    reference, inputs = tiny_model("bert", "choice"), choices()
    model = copy.deepcopy(reference)
    if way == "Trainer":
        batches = [batch([5, 3, 6, 1, 2, 4]), inputs]
        batches[0] = {**batches[0], **{n: batches[0][n].view(3, 2, 6) for n in ("input_ids", "attention_mask")}}
        batches[0]["labels"] = inputs["labels"]
        batches.append(batches[0])
        technique = Unpadding(8)
        trainers = [trained([technique], model=model, batches=batches), trained(model=reference, batches=batches)]
        assert_near(final_weights(trainers[0]), final_weights(trainers[1]), what="weights")
        assert technique.evidence["micro_batches_kept_padded"] == 1
        return
    apply_unpadding(model, 8)
    if way == "plan":
        plan_unpadding(model, inputs["attention_mask"])
    for network in (reference, model):
        network(**inputs).loss.backward()
    assert_near(gradients(model), gradients(reference))


class TwoTextsEach(ComposerModel):
    """A bi-encoder whose sides have several texts for each sample, with masks of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = tiny_bert().bert

    def forward(self, batch: Batch) -> Tensor:
        sides = []
        for side in ("", "_b"):
            ids, mask = (batch[name + side].flatten(0, 1) for name in ("input_ids", "attention_mask"))
            hidden = self.bert(ids, mask).last_hidden_state * mask[..., None]
            sides.append(hidden.sum(1) / mask.sum(1, keepdim=True))
        return sides[0] @ sides[1].T

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, torch.arange(len(outputs)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_two_masks_of_one_shape_have_a_layout_each(compiled: bool) -> None:
    batches = []
    for seed in range(3):
        one, two = batch([9, 16, 3, 7], seed=seed), batch([5, 2, 16, 8], seed=50 + seed)
        texts = {**one, "input_ids_b": two["input_ids"], "attention_mask_b": two["attention_mask"]}
        batches.append({name: values.view(2, 2, -1) for name, values in texts.items() if name != "labels"})
    torch.manual_seed(0)
    expected = trained(model=TwoTextsEach(), batches=batches)
    torch.manual_seed(0)
    techniques = [Unpadding(8), *([TorchCompile(backend="eager")] if compiled else [])]
    trainer = make_trainer(techniques, model=TwoTextsEach(), batches=batches)
    trainer.fit()
    if not compiled:
        assert [encoder.packing.counted for encoder in unpadded_encoders(trainer.state.model)] == [0]
    trainer.close()
    assert_near(final_weights(trainer), final_weights(expected), what="weights")
