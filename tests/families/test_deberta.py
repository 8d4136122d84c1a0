"""DeBERTa-v2/v3: model variants, refused settings, and the relative distances of its attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.families.deberta_v2 import _entries
from composer_speedups.packing.encoder import unpadded_encoders
from tests.families.test_family_techniques import draw, outcome
from tests.helpers.models import tiny_model
from tests.helpers.unpadded import observed, unpad_and_fuse
from tests.reference.tolerance import assert_near

VARIANTS: dict[str, dict[str, Any]] = {
    "separate position projections": {"share_att_key": False},
    "relative embeddings without a norm": {"norm_rel_ebd": "none"},
    "with absolute positions": {"position_biased_input": True},
    "new masked-LM head": {"legacy": False},
    "no buckets": {"position_buckets": -1},
    "distances beyond the maximum": {"position_buckets": -1, "max_relative_positions": 5},
    "projected embeddings": {"embedding_size": 16},
}


@pytest.mark.parametrize("head", ["classification", "mlm"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_matches_the_untouched_model(variant: str, head: Any) -> None:
    reference = tiny_model("deberta_v2", head, **VARIANTS[variant]).train()
    model, inputs = copy.deepcopy(reference), draw("deberta_v2", head, "right padding")
    unpad_and_fuse(model)
    for actual, expected in zip(outcome(model, inputs, ""), outcome(reference, inputs, ""), strict=True):
        assert_near(actual, expected, what=variant)
    ran = observed(lambda: model(**inputs))
    assert (ran["torch_layer"], ran["first_tokens"]) == ((1, 1) if head == "classification" else (2, 0))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"conv_kernel_size": 3}, r"^unpadding does not support DeBERTa-v2/v3 with a convolution .*conv_kernel_size"),
        ({"pos_att_type": ["c2p"]}, r"^unpadding does not support DeBERTa-v2/v3 with other positions than"),
        ({"relative_attention": False}, r"^unpadding does not support DeBERTa-v2/v3 with other positions than"),
    ],
)
def test_unsupported_settings_are_refused_and_the_model_is_unchanged(settings: dict[str, Any], error: str) -> None:
    model = tiny_model("deberta_v2", **settings)
    with pytest.raises(ValueError, match=error):
        unpad(model)
    assert not unpadded_encoders(model)


def test_an_encoder_called_directly_returns_all_hidden_states() -> None:
    model = tiny_model("deberta_v2")
    reference = copy.deepcopy(model).deberta.encoder
    unpad(model, 8)
    model(**draw("deberta_v2", "classification", "right padding"))  # does not request hidden states
    hidden, mask = torch.randn(3, 9, 32), (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    actual, expected = (encoder(hidden, mask) for encoder in (model.deberta.encoder, reference))
    assert len(actual.hidden_states) == len(expected.hidden_states) == 3
    assert_near([*actual.hidden_states], [*expected.hidden_states])


@pytest.mark.parametrize(("buckets", "furthest"), [(6, 80), (256, 512), (-1, 20)])
def test_entries_match_the_relative_positions_of_transformers(buckets: int, furthest: int) -> None:
    width, span = 150, buckets if buckets > 0 else furthest
    entries = _entries(256, buckets, furthest, torch.device("cpu"))
    slots = torch.zeros(1, width, 1)
    distances = build_relative_position(slots, slots, buckets, furthest)[0]
    expected = (distances + span).clamp(0, 2 * span - 1)
    positions = torch.arange(width)
    torch.testing.assert_close(entries[positions[:, None] - positions + 256].long(), expected)
    assert (entries.diff() >= 0).all(), "the kernel sums over an entry's distances, which must be contiguous"
