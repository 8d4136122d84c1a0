"""Unpadding with ``mlm_head: labelled``: a masked-LM head that computes only the tokens with a label."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from composer.metrics import MaskedAccuracy
from composer.models import HuggingFaceModel
from torch import Tensor

from composer_speedups import TorchCompile, Unpadding, apply
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.core.errors import Refusal
from composer_speedups.families.flops import training_flops
from composer_speedups.packing.encoder import (
    LabelledHead,
    head_tokens,
    labelled_heads,
    unpadded_encoders,
    with_counted_rows,
)
from tests.helpers.common import (
    VOCABULARY,
    Batch,
    Recorder,
    batch,
    make_trainer,
    plain_batches,
    trained,
    without_labels,
)
from tests.helpers.exhaustive import family_params
from tests.helpers.models import UNPADDED, Family, fit_batches, tiny_model
from tests.helpers.rerun import graphed
from tests.reference.loop import counted, gradients
from tests.reference.tolerance import assert_near


def loss_and_gradients(model: Any, inputs: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def masked_lm(family: Family = "bert", **settings: Any) -> tuple[Any, list[Batch]]:
    """A model, and batches whose last slot has a label: the layout's unused entries are gathered from there."""
    model = tiny_model(family, "mlm", **settings).train()
    return model, fit_batches(model, [batch([12, 7, 1, 16], 16, seed=i) for i in range(3)])


def labelled(inputs: Batch) -> int:
    return int((inputs["labels"] != -100).sum())


@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_loss_and_gradients_equal_the_untouched_models(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, batches = masked_lm(family)
    model = copy.deepcopy(reference)
    unpad(model, 8, "labelled")
    for given in (dict, lambda inputs: counted(model, inputs)):
        for inputs in batches:
            assert_near(loss_and_gradients(model, given(inputs)), loss_and_gradients(reference, inputs))
        shape = (1, -(-labelled(inputs) // 8) * 8, VOCABULARY)
        assert model(**given(inputs)).logits.shape == shape
        monkeypatch.setattr(LabelledHead, "_count_and_lay_out", lambda *_: pytest.fail("counted in the forward pass"))


def test_labels_of_another_shape_are_left_to_transformers() -> None:
    """Its loss flattens them."""
    reference, (inputs, *_) = masked_lm()
    model = copy.deepcopy(reference)
    unpad(model, 8, "labelled")
    deeper = {**inputs, "labels": inputs["labels"][..., None]}
    assert_near(loss_and_gradients(model, deeper), loss_and_gradients(reference, deeper))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_with_dropout_they_equal_those_of_a_head_on_every_token(family: Family) -> None:
    model, batches = masked_lm(family, dropout=0.2)
    results = []
    for head in ("all", "labelled"):
        changed = copy.deepcopy(model)
        unpad(changed, 8, head)  # type: ignore[arg-type]
        results.append([loss_and_gradients(changed, inputs) for inputs in batches])
    assert_near(results[1], results[0])


@pytest.mark.parametrize("family", ["mpnet", "bert"])  # MPNet's head asks the encoder for a tuple, BERT's does not
def test_a_tuple_has_the_entries_of_the_untouched_models(family: Family) -> None:
    reference, (inputs, *_) = masked_lm(family)
    model = copy.deepcopy(reference)
    unpad(model, 8, "labelled")
    ours, theirs = (m(**inputs, output_hidden_states=True, return_dict=False) for m in (model, reference))
    assert [type(entry) for entry in ours] == [type(entry) for entry in theirs] == [Tensor, Tensor, tuple]
    real = inputs["attention_mask"].bool()
    assert_near(*([m[0][None], *(states[real] for states in m[2])] for m in (ours, theirs)))


def test_other_calls_compute_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, *_) = masked_lm()
    unpad(model, 8, "labelled")
    rows, width = inputs["input_ids"].shape
    everything = (rows, width, VOCABULARY)
    assert model(**without_labels(inputs)).logits.shape == everything
    with torch.no_grad():
        assert model(**inputs).logits.shape == everything
    assert model.eval()(**inputs).logits.shape == everything
    model.train()
    monkeypatch.setattr(model, "cls", None)  # the head
    with pytest.raises(TypeError, match="not callable"):
        model(**inputs)
    hidden = model.base_model(**without_labels(inputs)).last_hidden_state
    assert hidden.shape[:2] == (rows, width), "nothing remains of the failed call"


def test_it_can_be_switched_off_and_undone() -> None:
    model, (inputs, *_) = masked_lm()
    for multiple in (8, 64):
        unpad(model, multiple, "labelled")
        assert len(labelled_heads(model)) == 1
        assert model(**inputs).logits.shape[1] == -(-labelled(inputs) // multiple) * multiple
    unpad(model, 8)
    assert not labelled_heads(model)
    assert model(**inputs).logits.ndim == 3
    unpad(model, 8, "labelled")
    restore_encoders(model)
    assert model(**inputs).logits.shape[:2] == inputs["input_ids"].shape


def test_other_heads_and_training_metrics_are_refused_before_anything_is_changed() -> None:
    model = tiny_model("bert")
    with pytest.raises(ValueError, match="needs transformers' model with a masked-LM head, not BertForSequenceClass"):
        unpad(model, 8, "labelled")
    assert not unpadded_encoders(model)
    metered = HuggingFaceModel(tiny_model("bert", "mlm"), metrics=[MaskedAccuracy()], use_logits=True)
    for given, reason in (
        (metered, r"training metrics read them; set model\.train_metrics: false"),
        (None, "needs transformers' model with a masked-LM head"),
    ):
        with pytest.raises(Refusal, match=reason):
            make_trainer([Unpadding(8, mlm_head="labelled")], model=given)
    assert not unpadded_encoders(metered)


def test_a_trainer_trains_like_one_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LabelledHead, "_count_and_lay_out", lambda *_: pytest.fail("counted in the forward pass"))
    model = tiny_model("bert", "mlm")
    batches = fit_batches(model, plain_batches())
    technique, recorder = Unpadding(8, mlm_head="labelled"), Recorder()
    plain, other = Recorder(), copy.deepcopy(model)
    for algorithms, network, seen in (([technique], model, recorder), ([], other, plain)):
        trained(algorithms, model=network, batches=batches, callbacks=[seen])
    assert_near(recorder.losses, plain.losses)
    assert_near(dict(model.named_parameters()), dict(other.named_parameters()))
    tokens = sum(map(labelled, batches))
    slots = sum(inputs["labels"].numel() for inputs in batches)
    assert technique.evidence["head_tokens"] == round(tokens / slots, 4)


def test_a_run_whose_head_got_no_labels_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LabelledHead, "select", lambda *_: None)
    model = tiny_model("bert", "mlm")
    with pytest.raises(Refusal, match="the masked-LM head computed every token"):
        trained([Unpadding(8, mlm_head="labelled")], model=model, batches=fit_batches(model, plain_batches()))


@pytest.mark.parametrize("others", [(), (TorchCompile(scope="model", backend="eager"),)], ids=["graphs", "compiled"])
def test_compiled_or_replayed_with_other_labels_it_equals_the_untouched_model(others: Any) -> None:
    reference, batches = masked_lm(layers=1)
    model = copy.deepcopy(reference)
    apply(model, [Unpadding(8, mlm_head="labelled", check="never"), *others])
    calls = None if others else graphed(model)
    for inputs in batches:
        with with_counted_rows(model, inputs, inputs):
            assert_near(loss_and_gradients(model, inputs), loss_and_gradients(reference, inputs))
            assert model(**inputs).logits.shape[0] == 1
    if calls is not None:
        assert (calls.graphs, calls.replays, calls.eager_calls) == (1, 6, 0)


def test_only_computed_tokens_count_in_the_heads_operations() -> None:
    model, (inputs, *_) = masked_lm()
    assert head_tokens(model, inputs) is None
    unpad(model, 8, "labelled")
    assert head_tokens(model, inputs) == head_tokens(model, counted(model, inputs)) == labelled(inputs)
    assert head_tokens(model, without_labels(inputs)) is None
    lengths = inputs["attention_mask"].sum(-1).numpy()
    every, some = (training_flops(model.config, lengths, "mlm", tokens) for tokens in (None, labelled(inputs)))
    hidden = model.config.hidden_size
    assert every - some == 3 * 2 * (int(lengths.sum()) - labelled(inputs)) * hidden * (hidden + VOCABULARY)
