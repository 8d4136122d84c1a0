"""Unpadded models return the untouched model's hidden states and attention weights, however they are requested."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers
from packaging.version import Version

from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from tests.helpers.common import batch
from tests.helpers.exhaustive import family_params
from tests.helpers.models import UNPADDED, Family, tiny_model
from tests.helpers.unpadded import pair
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.pins
BY_INDEX = pytest.mark.skipif(Version(transformers.__version__) < Version("5.17"), reason="hidden states by index")


def assert_same_records(actual: Any, expected: Any, *, states: int, attentions: int) -> None:
    """Compare the records of two model outputs, and their expected numbers of tensors."""
    for name, count in (("hidden_states", states), ("attentions", attentions)):
        theirs, ours = getattr(expected, name), getattr(actual, name)
        assert (theirs is None) == (ours is None) == (count == 0), name
        if count:
            assert len(theirs) == len(ours) == count, name
            assert [record is None for record in ours] == [record is None for record in theirs], name
            assert_near(
                [record for record in ours if record is not None], [record for record in theirs if record is not None]
            )


@pytest.mark.parametrize("request_by", ["config", pytest.param("index", marks=BY_INDEX)])
@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_requested_hidden_states(family: Family, request_by: str) -> None:
    reference, model, encoder = pair(family)
    inputs, by_index = batch([3, 7, 1], 9), request_by == "index"
    for network in (reference, model):
        network.config.output_hidden_states = not by_index
    asked = {"output_hidden_states": [1]} if by_index else {}
    actual, expected = (network(**inputs, **asked) for network in (model, reference))
    assert_same_records(actual, expected, states=len(expected.hidden_states) if by_index else 3, attentions=0)
    assert encoder.ran == "padded"


@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_attention_weights_requested_in_the_config(family: Family) -> None:
    """Requested before the surgery: afterwards, transformers refuses, because the attention is not eager."""
    reference, inputs = tiny_model(family, output_attentions=True), batch([3, 7, 1], 9)
    model = copy.deepcopy(reference)
    unpad(model, 8)
    assert_same_records(model(**inputs), reference(**inputs), states=0, attentions=2)


@pytest.mark.parametrize("family", family_params(UNPADDED))
def test_hidden_states_requested_before_unpadding(family: Family) -> None:
    """transformers installs its recording hooks at the first call that requests records, and only then."""
    model, inputs, asked = tiny_model(family), batch([3, 7, 1], 9), {"output_hidden_states": True}
    expected = model(**inputs, **asked)
    unpad(model, 8)
    assert_same_records(model(**inputs, **asked), expected, states=3, attentions=0)
