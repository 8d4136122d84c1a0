"""Unpadding with a thousand generated masks: logits, loss and gradients equal the untouched model's.

Kind of mask, batch, positions and token types are drawn from a seed, which a failing test names.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.common import Batch
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.masks import KINDS, draw_mask, masked_batch
from tests.helpers.models import HEADS, UNPADDED, Family, Head, tiny_model
from tests.helpers.unpadded import pair, values
from tests.reference.loop import counted
from tests.reference.tolerance import assert_near

CASES = 14 * len(KINDS)  # for each family and head


def draw_batch(mask: Tensor, model: Any, head: Head, seed: int) -> Batch:
    """Draw tokens, labels, positions in any order, and token types if the model has them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = masked_batch(mask, head, seed=seed)
    inputs["input_ids"] = inputs["input_ids"].masked_fill((mask == 0) & bool(seed % 2), model.config.pad_token_id)
    if seed % 3:
        inputs["position_ids"] = torch.randint(2, 80, mask.shape, generator=generator)
    if hasattr(model.config, "type_vocab_size"):
        inputs["token_type_ids"] = torch.randint(0, 2, mask.shape, generator=generator)
    return inputs


@pytest.mark.parametrize(
    ("family", "head"),
    others_exhaustive(product(UNPADDED, HEADS), [("bert", "classification"), ("modernbert", "mlm")].__contains__),
)
@pytest.mark.pins
def test_every_kind_of_mask_matches_the_untouched_model(family: Family, head: Head) -> None:
    reference, model, encoder = pair(family, head)
    unpadded = dict.fromkeys(KINDS, 0)
    for seed in range(CASES):
        kind = KINDS[seed % len(KINDS)]
        mask = draw_mask(kind, seed)
        inputs = draw_batch(mask, reference, head, seed)
        counted(model, mask if seed % 4 else None)
        assert_near(values(model, inputs), values(reference, inputs), what=f"{family}, {head}, {kind}, seed {seed}")
        unpadded[kind] += encoder.ran == "unpadded"
    # A classifier's head reads the first slot of each row, so left-padded batches run padded. Holes change the
    # distances between packed tokens that DeBERTa and MPNet use.
    never = {kind for kind, count in unpadded.items() if count == 0}
    padded = {"left padding"} if head == "classification" else set()
    by_distance = family in ("deberta_v2", "mpnet")
    assert never <= (padded | {"holes"} if by_distance else padded)
    if head == "mlm" and family != "modernbert":
        always = {count for kind, count in unpadded.items() if not (by_distance and kind == "holes")}
        assert always == {CASES // len(KINDS)}


def test_masks_match_their_kind() -> None:
    drawn = {kind: [draw_mask(kind, seed) for seed in range(40)] for kind in KINDS}
    assert all(mask.any() for masks in drawn.values() for mask in masks)
    assert all((mask.diff(dim=-1) <= 0).all() for mask in drawn["right padding"])
    assert any((mask[:, 0] == 0).any() for mask in drawn["left padding"])
    assert all((mask.diff(dim=-1) >= 0).all() for mask in drawn["left padding"])
    assert any((mask.diff(dim=-1) > 0).any() for mask in drawn["holes"])
    assert all((mask.sum(-1) == 0).any() for mask in drawn["rows of nothing"])
    assert all((mask.sum(-1) == 1).any() for mask in drawn["rows of one token"])
    assert sum(int(mask.sum()) % 8 in (6, 7) for mask in drawn["short of a multiple of 8"]) >= 20
    assert {mask.shape[1] for mask in drawn["width 1"]} == {1}
    assert {len(mask) for mask in drawn["one row"]} == {1}
    assert all(mask.all() for mask in drawn["no padding"])


def test_models_depend_on_positions_and_token_types() -> None:
    """If a model ignored them, varying them would test nothing."""
    mask = torch.ones(2, 6, dtype=torch.long)
    for family in UNPADDED:
        model = tiny_model(family, layers=1)
        inputs = draw_batch(mask, model, "classification", 1)
        base = model(**inputs).logits
        for name in {"position_ids", "token_type_ids"} & set(inputs):
            if (family, name) == ("deberta_v2", "position_ids"):  # v3 has only relative distances
                continue
            changed = inputs[name].flip(-1) if name == "position_ids" else 1 - inputs[name]
            assert not torch.allclose(model(**{**inputs, name: changed}).logits, base, atol=1e-3), (family, name)
