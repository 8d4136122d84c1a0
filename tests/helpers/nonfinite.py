"""A tiny classifier whose loss or gradient is NaN or infinite in marked batches, and such batches."""

from __future__ import annotations

from typing import Any

import torch
from composer.models import HuggingFaceModel

from tests.helpers.common import Batch, plain_batches, tiny_bert

MARK = 63  # the first token of a marked batch


class Poisoned(HuggingFaceModel):
    """Multiplies the loss by ``value`` in marked batches, or with ``overflow`` has an infinite gradient there."""

    def __init__(self, value: float = float("nan"), *, overflow: bool = False) -> None:
        super().__init__(tiny_bert(), use_logits=True)
        self.value, self.overflow = value, overflow

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss = super().loss(outputs, batch)
        marked = int(batch["input_ids"][0, 0]) == MARK
        if marked and self.overflow:
            bias = self.model.classifier.bias
            return loss + torch.sqrt((bias - bias.detach()).abs()).sum()  # 0, with an infinite gradient
        return loss * self.value if marked else loss


def batches(count: int, *poisoned: int) -> list[Batch]:
    """Return batches of 4 rows, of which those with the given numbers (from 1) are marked."""
    made = plain_batches(count)
    for number, batch in enumerate(made, start=1):
        batch["input_ids"][:, 0] = MARK if number in poisoned else 1
    return made
