"""Modules whose ``forward`` a technique replaced: copies and pickles compute with their own parameters."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from torch import nn

from composer_speedups import (
    apply_gradient_checkpointing,
    apply_mixed_precision,
    apply_unpadding,
    undo_gradient_checkpointing,
)
from composer_speedups.packing.encoder import unpadded_encoders
from composer_speedups.surgery.instance_forward import call_inner, has_forward, replace_forward, restore_forward
from tests.helpers.common import batch, tiny_bert


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("apply", [apply_mixed_precision, apply_gradient_checkpointing])
def test_a_twin_computes_with_its_own_parameters(apply: Any, twin_of: Any) -> None:
    model, inputs = tiny_bert().train(), batch([5, 9, 2])
    apply(model)
    twin = twin_of(model)
    expected = model(**inputs).logits
    torch.testing.assert_close(twin(**inputs).logits, expected)
    for parameter in twin.parameters():
        parameter.detach().zero_()
    assert not twin(**inputs).logits.any()
    torch.testing.assert_close(model(**inputs).logits, expected)
    if apply is apply_mixed_precision:
        assert twin(**inputs).logits.dtype == torch.bfloat16
    else:
        assert undo_gradient_checkpointing(twin) == undo_gradient_checkpointing(model)


def test_a_class_assigned_later_is_used() -> None:
    model, inputs = tiny_bert().eval(), batch([5, 9, 2])
    apply_mixed_precision(model)
    apply_unpadding(model)
    assert model(**inputs).logits.dtype == torch.bfloat16
    assert [encoder.ran for encoder in unpadded_encoders(model)] == ["unpadded"]


def test_composers_model_finds_the_arguments() -> None:
    model, inputs = tiny_bert().eval(), batch([5, 9, 2])
    apply_mixed_precision(model)
    wrapped = HuggingFaceModel(model, use_logits=True)
    torch.testing.assert_close(wrapped(inputs).logits, model(**inputs).logits)


def doubled(module: Any, inner: Any, /, *args: Any) -> Any:
    return 2 * call_inner(module, inner, *args)


def test_forwards_of_the_instance_are_kept() -> None:
    linear: Any = nn.Linear(2, 2)
    linear.forward = first = lambda x: x + 1
    replace_forward(linear, doubled)
    replace_forward(linear, doubled)
    assert linear(torch.ones(1)).item() == 8
    restore_forward(linear)
    assert has_forward(linear, doubled)
    restore_forward(linear)
    assert linear.forward is first
