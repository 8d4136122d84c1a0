"""T5's encoder: every technique with every supported head and input; models with the decoder are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import T5EncoderModel, T5ForConditionalGeneration, T5ForQuestionAnswering, T5ForSequenceClassification

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.family import config_value
from composer_speedups.packing.encoder import unpadded_encoders
from tests.families.test_family_techniques import _one_thread, applied, check, draw, outcome, untouched
from tests.helpers.models import tiny_model
from tests.helpers.refusals import INPUTS, TECHNIQUES
from tests.reference.loop import counted
from tests.reference.tolerance import assert_near

__all__ = ["_one_thread"]  # a fixture of that module
pytestmark = [pytest.mark.pins, pytest.mark.exhaustive]
HEADS = ("tokens", "pooling")
INPUT_KINDS = [
    input_kind for input_kind in INPUTS if input_kind not in ("token types", "position ids")
]  # which T5 does not accept


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
def test_planned_batches_with_both_kinds_of_feed_forward(gated: bool) -> None:
    settings = {"is_gated_act": True, "dense_act_fn": "gelu_new"} if gated else {}  # feed_forward_proj=gated-gelu
    model = tiny_model("t5", "tokens", **settings)
    kinds = {type(block.layer[-1].DenseReluDense).__name__ for block in repeated_blocks(model).values()}
    assert kinds == {"T5DenseGatedActDense" if gated else "T5DenseActDense"}
    inputs = draw("t5", "tokens", "right padding")
    expected = outcome(model, inputs, "right padding")
    unpad(model, 8)
    counted(model, inputs["attention_mask"])
    actual = outcome(model, inputs, "right padding")
    assert [(encoder.ran, encoder.packing.counted) for encoder in unpadded_encoders(model)] == [("unpadded", 0)]
    assert_near(actual[0], expected[0])
    assert_near(actual[1], expected[1])


def test_dropout_masks_are_the_same_without_padding() -> None:
    inputs = draw("t5", "tokens", "no padding")
    actual = []
    for packs in (False, True):
        model = tiny_model("t5", "tokens", dropout=0.3).train()
        if packs:
            unpad(model, 8)
        torch.manual_seed(5)
        actual.append(outcome(model, inputs, "no padding"))
    assert_near(actual[1][0], actual[0][0])
    assert_near(actual[1][1], actual[0][1])


def test_undo_unpadding_restores_the_model() -> None:
    model = untouched("t5", "tokens")
    names, kind = [*model.state_dict()], type(model.transformer.encoder)
    assert unpad(model) == ["transformer.encoder"]
    assert [*model.state_dict()] == names
    assert type(model.transformer.encoder) is not kind
    assert restore_encoders(model) == ["transformer.encoder"]
    assert type(model.transformer.encoder) is kind
    assert model.config._attn_implementation == "eager"
    assert config_value(model.config, "inner") == 64


@pytest.mark.parametrize("kind", [T5ForConditionalGeneration, T5ForSequenceClassification, T5ForQuestionAnswering])
def test_models_with_the_decoder_are_refused(kind: Any) -> None:
    model = kind(tiny_model("t5", "tokens").config)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"^unpadding does not support {kind.__name__}, which is a decoder$"):
        unpad(model)
    assert [type(module) for module in model.modules()] == before
    assert unpad(T5EncoderModel(model.config)) == ["encoder"]
