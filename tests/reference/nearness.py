"""Measure the error of a model in 16 or 8 bits against float32: of its logits and of its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composer_speedups.kernels.common import counting
from tests.helpers.common import Batch
from tests.helpers.masks import masked_batch, random_masks, real_logits
from tests.reference.loop import gradients, on_gpu


def values(model: Any, inputs: Batch, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return the logits of the real tokens or rows, and all gradients, flattened; ``dtype`` is that of autocast."""
    model.zero_grad()
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(**inputs)
    output.loss.backward()
    flat = torch.cat([gradient.flatten() for gradient in gradients(model).values()])
    return real_logits(output, inputs["attention_mask"]).detach().float().flatten(), flat


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def errors(
    stock: Any, ours: Any, head: str, dtype: torch.dtype, ran: str = "fused_layer", first: int = 200
) -> dict[str, tuple[float, float]]:
    """Return, of logits and gradients over random masks, the errors of ours and of the padded model against float32.

    ``ran`` must have run in ours. ``first`` is the first mask's seed: from 200, no input of the ReLU in DistilBERT's
    head is so near zero that rounding would flip its gradient.
    """
    exact, theirs, mine = [], [], []
    for seed, mask in enumerate(random_masks(25, widest=64), first):
        inputs = on_gpu(masked_batch(mask, head, seed=seed))
        exact.append(values(stock, inputs, None))
        theirs.append(values(stock, inputs, dtype))
        with counting() as counts:
            mine.append(values(ours, inputs, dtype))
        assert gradients(ours).keys() == gradients(stock).keys()
    assert counts[ran], counts
    found = {}
    for i, what in enumerate(("logits", "gradients")):
        reference = torch.cat([step[i] for step in exact])
        error, padded = (distance(torch.cat([step[i] for step in each]), reference) for each in (mine, theirs))
        found[what] = error, padded
    return found
