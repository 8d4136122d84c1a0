"""An untouched model beside an unpadded copy of it, and what tests compare between the two."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.kernels.common import counting
from tests.helpers.common import Batch
from tests.helpers.masks import real_logits
from tests.helpers.models import Family, Head, tiny_model
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


def unpad_and_fuse(model: Any, multiple: int = 8) -> Any:
    """Apply unpadding and fused_layers to a model, without a comparison; return it."""
    unpad(model, multiple)
    fuse(model)
    return model


def pair(
    family: Family = "bert",
    head: Head = "classification",
    multiple: int = 8,
    *,
    apply: Callable[[Any, int], Any] = unpad,
    **settings: Any,
) -> tuple[Any, Any]:
    """Return an untouched model and an unpadded one with the same weights."""
    reference = tiny_model(family, head, **settings)
    model = copy.deepcopy(reference)
    apply(model, multiple)
    return reference, model


def values(model: Any, inputs: Batch) -> dict[str, Tensor]:
    """The logits of real tokens, the loss, and all gradients."""
    model.zero_grad()
    output = model(**inputs)
    if output.loss.requires_grad:  # it does not if all adapters are merged
        output.loss.backward()
    logits = real_logits(output, inputs["attention_mask"])
    return {"logits": logits.detach(), "loss": output.loss.detach(), **gradients(model)}


def observed(call: Callable[[], Any]) -> Counter[str]:
    """Call a function, and return what the package's own code reported."""
    with counting() as ran:
        call()
    return ran


def way(ran: Counter[str]) -> str:
    """How the encoders ran: packed, padded, both, or not at all."""
    ways = [name for name in ("packed", "padded") if ran[f"{name}_encoder"]]
    return " and ".join(ways) or "not at all"


def compared(reference: nn.Module, model: nn.Module, loss: Callable[[Any], Tensor]) -> str:
    """Compare a loss and all its gradients, and return the :func:`way` in which the model ran."""
    results = []
    for module in (reference, model):
        module.zero_grad()
        with counting() as ran:
            value = loss(module)
            value.backward()
        found = way(ran)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        results.append([value.detach(), *grads])
    assert_near(results[1], results[0])
    return found
