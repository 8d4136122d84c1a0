"""A plain module of equal blocks, and one training step of it, for the tests of gradient checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.loop import gradients

LAYERS = ["bert.encoder.layer.0", "bert.encoder.layer.1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.dropout(self.linear(x)).tanh()


class Plain(nn.Module):
    """No Hugging Face model; its input requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def step(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_equal(actual: Any, expected: Any) -> None:
    assert len(expected) > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
