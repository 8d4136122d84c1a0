"""T5's encoder: every technique with every supported head and input; models with the decoder are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import T5EncoderModel, T5ForConditionalGeneration, T5ForQuestionAnswering, T5ForSequenceClassification

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.family import config_value
from tests.families.test_family_techniques import applied, check, draw, outcome, untouched
from tests.helpers.models import tiny_model
from tests.helpers.refusals import INPUTS, TECHNIQUES
from tests.reference.loop import counted
from tests.reference.tolerance import assert_near

pytestmark = [pytest.mark.pins, pytest.mark.exhaustive]
HEADS = ("tokens", "pooling")
INPUT_KINDS = [kind for kind in INPUTS if kind not in ("token types", "position ids")]  # which T5 does not accept


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_every_input_matches_the_untouched_model_or_is_refused(technique: str, head: str) -> None:
    torch.compiler.reset()
    model = applied(technique, "t5", head)
    if model is None:
        return
    for input_kind in INPUT_KINDS if technique != "torch_compile" or head == "tokens" else ("right padding",):
        if head == "pooling" and input_kind in ("no mask", "4-D mask"):  # the pooling head needs a 2-D mask
            continue
        check(model, technique, "t5", head, input_kind)


@pytest.mark.parametrize("gated", [False, True])
def test_counted_batches_with_both_kinds_of_feed_forward(gated: bool) -> None:
    settings = {"is_gated_act": True, "dense_act_fn": "gelu_new"} if gated else {}  # feed_forward_proj=gated-gelu
    reference = tiny_model("t5", "tokens", **settings)
    kinds = {type(block.layer[-1].DenseReluDense).__name__ for block in repeated_blocks(reference).values()}
    assert kinds == {"T5DenseGatedActDense" if gated else "T5DenseActDense"}
    model, inputs = copy.deepcopy(reference), draw("t5", "tokens", "right padding")
    unpad(model, 8)
    actual = outcome(model, counted(model, inputs), "right padding")
    for ours, theirs in zip(actual, outcome(reference, inputs, "right padding"), strict=True):
        assert_near(ours, theirs)


def test_undoing_restores_the_model() -> None:
    model = untouched("t5", "tokens")
    names, kind = [*model.state_dict()], type(model.transformer.encoder)
    assert unpad(model) == ["transformer.encoder"]
    assert [*model.state_dict()] == names
    assert type(model.transformer.encoder) is not kind
    assert restore_encoders(model) == ["transformer.encoder"]
    assert type(model.transformer.encoder) is kind
    assert config_value(model.config, "inner") == 64


@pytest.mark.parametrize("kind", [T5ForConditionalGeneration, T5ForSequenceClassification, T5ForQuestionAnswering])
def test_models_with_the_decoder_are_refused(kind: Any) -> None:
    model = kind(tiny_model("t5", "tokens").config)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"^unpadding does not support {kind.__name__}, which is a decoder$"):
        unpad(model)
    assert [type(module) for module in model.modules()] == before
    assert unpad(T5EncoderModel(model.config)) == ["encoder"]
