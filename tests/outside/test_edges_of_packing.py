"""What depends on the padded batch, or is read in each call: computed as untouched, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.integrations.neftune import activate_neftune

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from tests.helpers.common import Batch, batch, tiny_bert, without_labels
from tests.helpers.exhaustive import family_params
from tests.helpers.models import EVERY, FUSED, Family, fit_batches, tiny_model
from tests.helpers.unpadded import compared, unpad_and_fuse
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.outside


def pair(family: Family = "bert", **settings: Any) -> tuple[Any, Any, Batch]:
    """An untouched model, the same one unpadded and with fused layers, and a batch."""
    reference = tiny_model(family, "tokens" if family == "t5" else "classification", **settings)
    model = copy.deepcopy(reference)
    unpad_and_fuse(model, 64) if family in FUSED else unpad(model)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    if family == "t5":
        inputs["labels"] = (inputs["input_ids"] % 2).masked_fill(inputs["attention_mask"] == 0, -100)
    return reference, model, inputs


def from_the_left(inputs: Batch) -> Batch:
    """The batch with its padding on the left."""
    return {name: value.flip(1) if value.ndim == 2 else value for name, value in inputs.items()}


# Settings that transformers reads in each call.


@pytest.mark.parametrize(
    ("family", "setting", "before", "after"),
    [
        ("nomic_bert", "num_hidden_layers", 2, 1),
        ("eurobert", "num_hidden_layers", 2, 1),
        ("jina_embeddings_v3", "num_hidden_layers", 2, 1),
        ("albert", "num_hidden_layers", 2, 1),
        ("bert", "num_hidden_layers", 2, 1),  # where nothing reads it
        ("modernbert", "num_hidden_layers", 2, 1),
        ("modernbert", "sliding_window", 4, 1),
        ("modernbert", "classifier_pooling", "cls", "mean"),
        ("eurobert", "classifier_pooling", "mean", "bos"),
        ("bert", "is_decoder", False, True),
        ("esm", "is_decoder", False, True),
    ],
)
def test_a_setting_that_is_changed_later(family: Family, setting: str, before: Any, after: Any) -> None:
    layers = {} if setting == "num_hidden_layers" else {setting: before}
    reference, model, inputs = pair(family, **layers)
    inputs = from_the_left(inputs) if after == "bos" else inputs
    for value in (before, after, before):
        setattr(reference.config, setting, value)
        setattr(model.config, setting, value)
        ran = compared(reference, model, lambda module: module(**inputs).loss)
    assert ran == "packed"


# The width of the padded batch.


@pytest.mark.parametrize("family", [*family_params(EVERY), "t5"])
def test_neftune_adds_the_noise_of_the_padded_batch(family: Family) -> None:
    """transformers' hook divides the noise by the root of the row's width."""
    reference, model, inputs = pair(family)
    for module in (reference.train(), model.train()):
        activate_neftune(module, 5.0)

    def loss(module: Any) -> Tensor:
        torch.manual_seed(0)
        return module(**inputs).loss  # type: ignore[no-any-return]

    assert compared(reference, model, loss) == "packed"


# Derivatives of a higher order, and in forward mode.


def gradient_penalty(model: Any, inputs: Batch) -> Tensor:
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"], labels=inputs["labels"]).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + gradient.square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", family_params(EVERY))
def test_a_gradient_penalty_is_refused_by_name(family: Family) -> None:
    reference, model, inputs = pair(family)
    with pytest.raises(RuntimeError, match=r"^unpadding has no second derivative .*remove unpadding"):
        gradient_penalty(model, inputs)
    restore_encoders(model)
    compared(reference, model, lambda module: gradient_penalty(module, inputs))


@pytest.mark.parametrize("family", family_params(EVERY))
def test_forward_mode_derivatives(family: Family) -> None:
    reference, model, inputs = pair(family)
    tangents = []
    for module in (reference, model):
        embedded = module.get_input_embeddings()(inputs["input_ids"]).detach()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(embedded, embedded.cos())
            logits = module(inputs_embeds=dual, attention_mask=inputs["attention_mask"]).logits
            tangents.append(forward_ad.unpack_dual(logits).tangent)
    assert tangents[0].any()
    assert_near([tangents[1]], [tangents[0]])
    assert compared(reference, model, lambda module: module(**inputs).loss) == "packed"


# One adapter for each row.


def test_an_adapter_for_each_row() -> None:
    peft = pytest.importorskip("peft")
    reference, inputs = tiny_bert().eval(), without_labels(batch([5, 12, 9]))
    settings = peft.LoraConfig(target_modules=["query", "dense"], r=2, init_lora_weights=False)
    reference = peft.get_peft_model(reference, settings, "one")
    reference.add_adapter("two", settings)
    model = copy.deepcopy(reference.eval())
    unpad(model, 8)
    names = ["one", "__base__", "two"]
    for given, how in (({"adapter_names": names}, "padded"), ({}, "packed"), ({"adapter_names": names}, "padded")):
        with torch.no_grad():
            assert_near([model(**inputs, **given).logits], [reference(**inputs, **given).logits])
        assert compared(reference, model, lambda m: m(**inputs, **given).logits.square().sum()) == how  # noqa: B023


def test_a_data_parallel_model_is_refused() -> None:
    """Also if it wraps the changed model: torch then calls the last method of each module."""
    model = tiny_bert()
    with pytest.raises(ValueError, match=r"^composer_speedups does not support nn\.DataParallel; "):
        unpad(nn.DataParallel(model))
    assert type(model) is type(tiny_bert())
    unpad(model)
    with pytest.raises(ValueError, match=r"^composer_speedups does not support nn\.DataParallel; "):
        [module._replicate_for_data_parallel() for module in model.modules()]
