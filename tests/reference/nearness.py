"""Measure the error of a 16-bit model against float32: its logits and gradients, and their relative distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.common import Batch
from tests.helpers.masks import real_logits
from tests.reference.loop import gradients


def values(model: Any, inputs: Batch, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return the logits of the real tokens or rows, and all gradients, flattened and in float32.

    Args:
        model: The model.
        inputs: Its inputs, with labels.
        dtype: Dtype of autocast; None computes in float32.
    """
    model.zero_grad()
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(**inputs)
    output.loss.backward()
    flat = torch.cat([gradient.flatten() for gradient in gradients(model).values()])
    return real_logits(output, inputs["attention_mask"]).detach().float().flatten(), flat


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
