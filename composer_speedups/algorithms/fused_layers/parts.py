"""What a layer consists of, whatever its family calls it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["Parts", "Rates"]


class Parts(NamedTuple):
    """A layer's modules and its number of attention heads."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    output_norm: nn.LayerNorm
    heads: int

    def parameters(self) -> list[Tensor]:
        """Weight and bias of each, in the order that the fused layer takes them."""
        return [p for module in self[:-1] for p in (module.weight, module.bias)]  # type: ignore[union-attr]


class Rates(NamedTuple):
    """Probabilities of dropping: attention weights, the attention's output, the layer's output."""

    weights: float
    attention: float
    output: float
