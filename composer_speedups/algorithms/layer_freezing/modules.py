"""Freeze a model's first layers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from composer_speedups.families.blocks import first_layers


def first_parameters(model: nn.Module, blocks: int) -> dict[str, nn.Parameter]:
    """The parameters to freeze, by name: of the embeddings, a number of blocks, and all that computes their input;
    ValueError if they cannot be frozen."""
    modules = first_layers(model, blocks)
    named = {f"{path}.{name}": p for path, module in modules.items() for name, p in module.named_parameters()}
    parameters = set(named.values())
    inside = {id(inner) for module in modules.values() for inner in module.modules()}
    for path, module in model.named_modules():
        if id(module) in inside or isinstance(module, nn.Embedding):  # T5 registers its embeddings twice
            continue
        tied = next((name for name, p in module._parameters.items() if p is not None and p in parameters), None)
        if tied is not None:
            raise ValueError(
                f"{path}.{tied} is tied to the embeddings and would be frozen, too; load the model with "
                "tie_word_embeddings=False"
            )
    return named


def freeze(model: nn.Module, optimizers: Iterable[Optimizer], blocks: int) -> None:
    """Stop training the first layers, between the optimizer's step and the next forward pass.

    The optimizers' groups stay: they skip parameters without gradients, and do not decay them.
    """
    for parameter in first_parameters(model, blocks).values():
        parameter.requires_grad_(False)
        parameter.grad = None
        for optimizer in optimizers:
            optimizer.state.pop(parameter, None)
