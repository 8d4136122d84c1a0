"""The optimizer's groups after freezing: frozen parameters leave, what is trained in their place takes their group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from composer_speedups.algorithms.lora.adapters import ADAPTER, adapted_layers, trained_copies

__all__ = ["regroup"]


def regroup(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Make the optimizers hold what is trained of ``model`` and nothing that is frozen.

    The matrices of an adapter and a module's trained copy enter the group of the weight that they stand for, and
    so keep its learning rate and weight decay. What stands for a weight that no group held enters the first
    group. Groups stay the objects they were, in their order, even when empty: learning-rate schedulers count
    them. A second call changes nothing.

    Returns:
        ``{"left", "entered"}``: parameters, counted.
    """
    optimizers = list(optimizers)
    names = {p: name for name, p in model.named_parameters()}
    heirs = _heirs(model)
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left = entered = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kept: list[Parameter] = []
            for p in group["params"]:
                frozen = p in names and not p.requires_grad
                new = [heir for heir in heirs.get(p, []) if heir not in held]
                kept += new if frozen else [p]
                held.update(new)
                entered += len(new)
                if frozen:
                    left += 1
                    _move_state(optimizer, p, new)
            _set(group, kept, names)
    rest = [heir for those in heirs.values() for heir in those if heir not in held]
    if rest and optimizers:
        group = optimizers[0].param_groups[0]
        _set(group, [*group["params"], *rest], names)
    return {"left": left, "entered": entered + len(rest)}


def _heirs(model: nn.Module) -> dict[Parameter, list[Parameter]]:
    """Frozen parameter → the trained ones that stand for it."""
    heirs: dict[Parameter, list[Parameter]] = {}
    for layer in adapted_layers(model).values():
        heirs[layer.get_base_layer().weight] = [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
    for wrapper in trained_copies(model).values():
        copied = dict(wrapper.modules_to_save[ADAPTER].named_parameters())
        for name, original in wrapper.original_module.named_parameters():
            heirs[original] = [copied[name]]
    return heirs


def _move_state(optimizer: torch.optim.Optimizer, frozen: Parameter, heirs: list[Parameter]) -> None:
    """A trained copy goes on from its original's state; an adapter starts without one."""
    state = optimizer.state.pop(frozen, None)
    if state and len(heirs) == 1:
        optimizer.state[heirs[0]] = state


def _set(group: dict[str, Any], parameters: list[Parameter], names: dict[Parameter, str]) -> None:
    if "param_names" in group:  # torch keeps them where the optimizer was given named parameters
        known = dict(zip(group["params"], group["param_names"], strict=True))
        group["param_names"] = [known.get(p) or names[p] for p in parameters]
    group["params"][:] = parameters
