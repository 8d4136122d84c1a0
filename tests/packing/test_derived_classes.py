"""Classes that are derived at run time, and modules that get their own class back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import BertForMaskedLM

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.packing.derived_classes import stock_class
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import batch
from tests.helpers.models import fit_batches, tiny_model
from tests.helpers.unpadded import observed, way
from tests.reference.tolerance import assert_near


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
