"""A tiny classifier whose loss is no number in batches that are marked, and the batches."""

from __future__ import annotations

from typing import Any

import torch
from composer.models import HuggingFaceModel

from tests.helpers.common import Batch, plain_batches, tiny_bert

MARK = 63  # the first token of a batch whose loss is no number


class Poisoned(HuggingFaceModel):
    """The loss, and with it every gradient, is multiplied by ``value`` in batches that begin with ``MARK``.

    With ``overflow``, the loss stays what it is there, and only the gradient of the classifier's bias is not finite.
    """

    def __init__(self, value: float = float("nan"), *, overflow: bool = False) -> None:
        super().__init__(tiny_bert(), use_logits=True)
        self.value, self.overflow = value, overflow

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss = super().loss(outputs, batch)
        marked = int(batch["input_ids"][0, 0]) == MARK
        if marked and self.overflow:
            bias = self.model.classifier.bias
            return loss + torch.sqrt((bias - bias.detach()).abs()).sum()  # 0, and its slope is not finite
        return loss * self.value if marked else loss


def batches(count: int, *poisoned: int) -> list[Batch]:
    """Batches of 4 rows, those with the given numbers (from 1) marked."""
    made = plain_batches(count)
    for number, batch in enumerate(made, start=1):
        batch["input_ids"][:, 0] = MARK if number in poisoned else 1
    return made
