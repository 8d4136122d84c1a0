"""An untouched model beside an unpadded copy of it, and what tests compare between the two."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from composer_speedups import apply_unpadding
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import Batch
from tests.helpers.masks import real_logits
from tests.helpers.models import Family, Head, tiny_model
from tests.reference.loop import gradients

__all__ = ["pair", "values"]


def pair(
    family: Family = "bert", head: Head = "classification", multiple: int = 8, **settings: Any
) -> tuple[Any, Any, Any]:
    """Return an untouched model, an unpadded one with the same weights, and the unpadded encoder."""
    reference = tiny_model(family, head, **settings)
    model = copy.deepcopy(reference)
    assert len(apply_unpadding(model, multiple)) == 1
    return reference, model, *unpadded_encoders(model)


def values(model: Any, inputs: Batch) -> dict[str, Tensor]:
    """Return the logits of real tokens, the loss, and all gradients."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    logits = real_logits(output, inputs["attention_mask"])
    return {"logits": logits.detach(), "loss": output.loss.detach(), **gradients(model)}
