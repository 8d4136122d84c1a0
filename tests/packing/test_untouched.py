"""``untouched``: a changed model computes what the untouched one does, to the last bit; and subclasses like FSDP's."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM

from composer_speedups import FastLayerNorm, SDPAAttention, apply, untouched
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.packing.derived_classes import stock_class
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.packing.untouched import is_untouched
from tests.helpers.common import batch
from tests.helpers.exhaustive import family_params
from tests.helpers.models import EVERY, FUSED, Family, fit_batches, tiny_model
from tests.helpers.unpadded import compared, observed, pair, unpad_and_fuse, way
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


@pytest.mark.parametrize("head", ["classification", "mlm"])
@pytest.mark.parametrize("family", family_params(EVERY))
def test_loss_outputs_and_gradients_with_dropout_are_those_of_the_untouched_model(family: Family, head: Any) -> None:
    settings: Any = {"apply": unpad_and_fuse} if family in FUSED else {}
    reference, model = pair(family, head, dropout=0.3, **settings)
    (inputs,) = fit_batches(reference, [batch([9, 16, 3, 12], 16)])
    results: list[Any] = []
    for network in (reference, model):
        network.train()
        torch.manual_seed(5)
        with untouched(model):
            output = network(**inputs)
            output.loss.backward()
        results.append([output.loss, output.logits, *gradients(network).values()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert observed(lambda: model(**inputs))["packed_encoder"], "the switch is off again"


@pytest.mark.parametrize("technique", [FastLayerNorm, SDPAAttention])
def test_replaced_norms_and_attention_are_off(technique: Any) -> None:
    reference = tiny_model("bert")
    model, inputs = copy.deepcopy(reference), batch([9, 16, 3])
    apply(model, [technique()])
    implementation = model.config._attn_implementation
    results: list[Any] = []
    for network in (reference, model):
        with untouched(network), torch.autocast("cpu", torch.bfloat16):
            results.append(network(**inputs).logits)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert compared(reference, model, lambda network: network(**inputs).loss) == "not at all"
    assert model.config._attn_implementation == implementation


def test_only_this_thread_is_untouched() -> None:
    seen = []
    with untouched(tiny_model("bert")):
        thread = threading.Thread(target=lambda: seen.append(is_untouched()))
        thread.start()
        thread.join()
        assert is_untouched()
    assert (seen, is_untouched()) == ([False], False)


class Sharded:
    """A base class like torch.distributed.fsdp.FSDPModule."""

    def reshard(self) -> str:
        return "resharded"


@pytest.mark.parametrize("mlm_head", ["all", "labelled"])
def test_a_subclass_like_fsdps_keeps_its_methods_when_the_model_is_restored(mlm_head: Any) -> None:
    reference = tiny_model("bert", "mlm")
    model: Any = copy.deepcopy(reference)
    (inputs,) = fit_batches(model, [batch([9, 3, 12])])
    unpad(model, 8, mlm_head)
    for module in (model.bert.encoder, model):
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (Sharded, kind), {})
    assert stock_class(type(model)) is BertForMaskedLM
    assert unpad(model, 8, mlm_head) == []
    assert_near([model(**inputs).loss], [reference(**inputs).loss])
    assert way(observed(lambda: model(**inputs))) == "packed"
    assert restore_encoders(model) == ["bert.encoder"]
    assert isinstance(model, BertForMaskedLM)
    assert [type(module).__name__ for module in (model.bert.encoder, model)] == [
        "FSDPBertEncoder",
        "FSDPBertForMaskedLM",
    ]
    assert not unpadded_encoders(model)
    assert [module.reshard() for module in (model.bert.encoder, model)] == ["resharded"] * 2
    assert_near([model(**inputs).logits], [reference(**inputs).logits])
