"""Models that embed the tokens themselves and have rotary positions: what other families do not have.

ESM-2's scale of a row by its share of masked tokens, EuroBERT's ways of pooling, and angles that depend on the width of
the batch. All other combinations are in test_family_techniques.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.kernels.host import counting
from tests.families.test_family_techniques import INPUTS, draw, outcome
from tests.helpers.common import Batch
from tests.helpers.models import ROTARY, Family, tiny_model
from tests.helpers.unpadded import way
from tests.reference.tolerance import assert_near

pytestmark = [pytest.mark.pins, pytest.mark.exhaustive]
MASK, PAD = 3, 1  # tokens of the tiny ESM
ESM_INPUTS = [kind for kind in INPUTS if kind not in ("token types", "4-D mask", "a row of padding")]


def masked_tokens(inputs: Batch) -> Batch:
    """The batch with a different number of masked tokens in each row."""
    if "input_ids" not in inputs:
        return inputs
    ids = inputs["input_ids"].clone()
    for row, count in enumerate((2, 4, 0, 1)):
        places = (ids[row] != PAD).nonzero().flatten()[1 : count + 1]
        ids[row, places] = MASK
    return {**inputs, "input_ids": ids}


def compare(reference: Any, inputs: Batch, kind: str, ran: str = "packed") -> None:
    model = copy.deepcopy(reference)
    unpad(model, 8)
    with counting() as seen:
        actual = outcome(model, inputs, kind)
    expected = outcome(reference, inputs, kind)
    assert way(seen) == ran, kind
    assert_near(actual[0], expected[0], what=f"outputs with {kind}")
    if kind != "eval mode":
        assert_near(actual[1], expected[1], what=f"gradients with {kind}")


@pytest.mark.parametrize("positions", ["rotary", "absolute"])
@pytest.mark.parametrize("head", ["mlm", "classification"])
def test_esm_scales_each_row_by_its_share_of_masked_tokens(head: Any, positions: str) -> None:
    absolute = positions == "absolute"  # as ESM-1b has them
    settings = {"position_embedding_type": positions, "token_dropout": True, "emb_layer_norm_before": absolute}
    reference = tiny_model("esm", head, **settings).train()
    for kind in ESM_INPUTS:
        padded = kind == "hidden states and attentions" or (kind == "left padding" and head == "classification")
        inputs = masked_tokens(draw("esm", head, kind))
        compare(reference, inputs, kind, "padded" if padded else "packed")
    inputs = draw("esm", head, "right padding")
    with torch.no_grad():
        scaled, other = (reference(**given).logits for given in (masked_tokens(inputs), inputs))
    assert not torch.allclose(scaled, other, atol=1e-2), "the masked tokens change the result"


def test_esm_computes_the_other_rows_of_a_batch_with_an_empty_row() -> None:
    """The untouched model divides that row's masked tokens by its length, 0; its gradients are NaN."""
    reference = tiny_model("esm", "mlm", token_dropout=True).train()
    whole = masked_tokens(draw("esm", "mlm", "a row of padding"))
    others = {name: values[[0, 1, 3]] for name, values in whole.items()}
    model = copy.deepcopy(reference)
    unpad(model, 8)
    actual, expected = outcome(model, whole, ""), outcome(reference, others, "")
    assert_near([actual[0]["loss"]], [expected[0]["loss"]])
    assert_near(actual[1], expected[1])
    assert not all(gradient.isfinite().all() for gradient in outcome(reference, whole, "")[1].values())


@pytest.mark.parametrize("pooling", ["mean", "late"])
def test_eurobert_pools_real_tokens(pooling: str) -> None:
    shared = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    reference = tiny_model("eurobert", classifier_pooling=pooling, **shared).train()
    for kind in ("right padding", "left padding", "holes", "no mask", "position ids"):
        compare(reference, draw("eurobert", "classification", kind), kind)


def test_angles_that_depend_on_the_width_of_the_batch() -> None:
    """The untouched model derives dynamic angles from the padded width, which no row reaches here."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    settings = {"rope_parameters": rope, "max_position_embeddings": 8}
    reference = tiny_model("eurobert", "tokens", **settings).train()
    inputs = draw("eurobert", "tokens", "right padding")
    inputs = {name: torch.cat([values, torch.zeros_like(values)], 1) for name, values in inputs.items()}
    inputs["labels"][:, 12:] = -100
    compare(reference, inputs, "right padding")


@pytest.mark.parametrize("family", ROTARY)
def test_packed_attention_has_autocasts_dtype(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 angles leave queries and keys in float32, for which there is no flash kernel."""
    asked = []

    def supports(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
        asked.append(dtype)
        return False

    monkeypatch.setattr("composer_speedups.packing.attention.supports_flash_attention", supports)
    model = tiny_model(family)
    unpad(model, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(**draw(family, "classification", "right padding"))
    assert set(asked) == {torch.bfloat16}


@pytest.mark.parametrize("family", ROTARY)
def test_a_bare_model_returns_what_the_untouched_one_does(family: Family) -> None:
    """Its output has the same fields, the pooled one included."""
    reference: Any = type(tiny_model(family, "tokens").base_model)(tiny_model(family).config).eval()
    model = copy.deepcopy(reference)
    unpad(model, 8)
    inputs = draw(family, "tokens", "right padding")
    del inputs["labels"]
    with torch.no_grad(), counting() as seen:
        actual, expected = model(**inputs), reference(**inputs)
        as_tuple = model(**inputs, return_dict=False)
    assert way(seen) == "packed"
    assert type(actual) is type(expected)
    assert actual.keys() == expected.keys()
    pooled = ("pooler_output",) if family in ("esm", "jina_embeddings_v3") else ()
    assert all(actual[name] is not None for name in pooled)
    for name in pooled:
        assert_near(actual[name], expected[name])
    real = inputs["attention_mask"].bool()
    assert_near(actual.last_hidden_state[real], expected.last_hidden_state[real])
    assert_near(as_tuple[0], actual.last_hidden_state)
    assert restore_encoders(model) == [""]
    assert type(model) is type(reference)
