"""Freeze a model's first layers, and when that is due."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_speedups.families.blocks import first_layers

if TYPE_CHECKING:
    from composer.core import State


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
    """Stop training the first layers, between the optimizer's step and the next forward pass, on every rank.

    The optimizers' groups stay: they skip parameters without gradients, and do not decay them. ``model`` is the
    DistributedDataParallel around a model, if there is one; its reducer is built again without the frozen parameters.
    """
    parameters = first_parameters(model, blocks).values()
    changed = any(p.requires_grad for p in parameters)
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
        for optimizer in optimizers:
            optimizer.state.pop(parameter, None)
    if changed:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                _rebuild_reducer(module)


def _rebuild_reducer(model: DistributedDataParallel) -> None:
    """Build a DDP's reducer again, for the parameters that require gradients now; otherwise it would wait for others.

    Communication hooks stay registered. torch rebuilds the buckets in the second backward pass, as those of a new DDP.

    Source: ``DistributedDataParallel.__setstate__``, which builds the reducer of a DDP that was unpickled.
    """
    if (sums := vars(model).get("gradient_sums")) is not None:  # distributed.ddp's buckets that are still in flight
        sums.settle()
    group, state, hooks = model.process_group, model.__getstate__(), list(model._comm_hooks)
    # the old reducer's hooks on the parameters are removed when nothing refers to it any more
    del model.reducer, model.logger
    state["_comm_hooks"] = []
    model.__setstate__(state)
    assert model.process_group is group
    for hook, hook_state in hooks:
        model.register_comm_hook(hook_state, hook)


def is_due(start: str, state: State) -> bool:
    """Whether a time in batches, epochs or a share of ``max_duration`` is over."""
    from composer.core import TimeUnit
    from composer.core.time import Time

    time, now, whole = Time.from_timestring(start), state.timestamp, state.max_duration
    if time.unit != TimeUnit.DURATION:
        return bool(now.get(time.unit).value >= time.value)
    assert whole is not None, "fit() has a duration"
    if whole.unit == TimeUnit.EPOCH and state.dataloader_len is not None:  # batch by batch
        return bool(now.batch.value >= time.value * whole.value * state.dataloader_len.value)
    return bool(now.get(whole.unit).value >= time.value * whole.value)
