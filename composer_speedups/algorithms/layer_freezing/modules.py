"""Freeze a model's first layers, and when that is due."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_speedups.algorithms.layer_freezing.reducer import rebuild_reducer
from composer_speedups.families.blocks import first_layers

if TYPE_CHECKING:
    from composer.core import State


def check_freezing(model: nn.Module, blocks: int) -> dict[str, nn.Module]:
    """The modules to freeze, by name: the embeddings, a number of blocks, and all that computes their input.

    Raises:
        ValueError: They cannot be frozen.
    """
    modules = first_layers(model, blocks)
    parameters = {p for module in modules.values() for p in module.parameters()}
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
    if not any(p.requires_grad and p not in parameters for p in model.parameters()):
        raise ValueError(f"layers={blocks or 'embeddings'!r} leaves no parameter to train")
    return modules


def freeze(model: nn.Module, optimizers: Iterable[Optimizer], blocks: int) -> None:
    """Stop training the first layers, between the optimizer's step and the next forward pass, on every rank.

    Args:
        model: Changed in place. If it is wrapped in DistributedDataParallel, the wrapper, whose reducer is then built
            again without the frozen parameters.
        optimizers: Their groups do not change: an optimizer skips parameters without gradients, and does not decay
            them.
        blocks: See :func:`check_freezing`.
    """
    parameters = {p for module in check_freezing(model, blocks).values() for p in module.parameters()}
    changed = any(p.requires_grad for p in parameters)
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
    for optimizer in optimizers:
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
    if changed:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                rebuild_reducer(module)


@torch.no_grad()
def sums(parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """Sums in float64, which any update changes."""
    return {name: float(p.sum(dtype=torch.float64)) for name, p in parameters.items()}


def is_due(start: str, state: State | None) -> bool:
    """Whether a time in batches, epochs or a share of ``max_duration`` is over; None is before training."""
    from composer.core import TimeUnit
    from composer.core.time import Time

    time = Time.from_timestring(start)
    if state is None or time.value == 0:
        return bool(time.value == 0)
    now, whole = state.timestamp, state.max_duration
    if time.unit != TimeUnit.DURATION:
        return bool(now.get(time.unit).value >= time.value)
    assert whole is not None, "fit() has a duration"
    if whole.unit == TimeUnit.EPOCH and state.dataloader_len is not None:  # batch by batch
        return bool(now.batch.value >= time.value * whole.value * state.dataloader_len.value)
    return bool(now.get(whole.unit).value >= time.value * whole.value)
