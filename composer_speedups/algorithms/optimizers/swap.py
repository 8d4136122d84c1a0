"""Change the implementation of a torch optimizer, or replace AdamW by another optimizer with the same parameters,
groups, learning rates and weight decay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR

Groups = list[dict[str, Any]]
Defaults = dict[str, Any]


def set_implementation(optimizer: Optimizer, flag: str) -> Optimizer:
    """Make a torch optimizer step with its ``"foreach"`` or ``"fused"`` implementation, again after it loads a state
    dict, which restores flags; ValueError if it has none."""
    if flag not in optimizer.defaults or not type(optimizer).__module__.startswith("torch.optim."):
        raise ValueError(f"{class_name(optimizer)} has no {flag} implementation")
    flags = {"foreach": flag == "foreach", "fused": flag == "fused"}
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group.update(flags)
    optimizer._step_supports_amp_scaling = flags["fused"]  # type: ignore[attr-defined]  # as torch's constructor does
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # torch keeps step counts on the parameter's device for fused kernels only
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor) and not group.get("capturable"):
                state["step"] = state["step"].to(parameter.device if flags["fused"] else "cpu", torch.float32)
    return optimizer


def replaced(old: Optimizer, build: Callable[[Groups, Defaults], Optimizer]) -> Optimizer:
    """Build another optimizer over the parameters of an AdamW or Composer's ``DecoupledAdamW``, in the same groups with
    their additional keys, such as ``initial_lr``, and with its hooks; ValueError if something would be lost.

    ``build`` gets groups with ``params``, ``lr``, ``betas``, ``eps`` and ``weight_decay`` (with torch's meaning), and
    the defaults of these settings.
    """
    name, decoupled = class_name(old), class_name(old).endswith("decoupled_weight_decay.DecoupledAdamW")
    if type(old) is not AdamW and not decoupled:
        raise ValueError(f"{name} is not AdamW, whose settings are needed")
    if any(len(state) for state in old.state.values()):
        raise ValueError(f"{name} has stepped, and its state would be lost")
    if lost := [key for key in ("amsgrad", "maximize") for group in old.param_groups if group.get(key)]:
        raise ValueError(f"{name} has {lost[0]}=True, which would be lost")
    defaults = _carried({"initial_lr": old.defaults["lr"] or 1.0, **old.defaults}, decoupled)
    groups = [{"params": list(group["params"]), **_carried(group, decoupled)} for group in old.param_groups]
    new = build(groups, defaults)
    for ours, theirs in zip(new.param_groups, old.param_groups, strict=True):
        ours.update({key: value for key, value in theirs.items() if key not in ("params", *old.defaults)})
    for hooks in [name for name in vars(old) if name.startswith("_optimizer_")]:
        getattr(old, hooks).update(getattr(new, hooks))
        setattr(new, hooks, getattr(old, hooks))  # the dicts themselves, so that the user's handles still remove them
        setattr(old, hooks, OrderedDict())  # without those of the new class
    if type(new) is not AdamW:
        new.register_step_pre_hook(_with_gradients)
    return new


def attach_schedulers(schedulers: Iterable[Any], old: Optimizer, new: Optimizer) -> None:
    """Make torch schedulers that were built on ``old``, nested ones included, set the learning rates of ``new``."""
    for scheduler in schedulers:
        attach_schedulers(getattr(scheduler, "_schedulers", ()), old, new)  # of SequentialLR and ChainedScheduler
        if old is not new and getattr(scheduler, "optimizer", None) is old:
            scheduler.optimizer = new
            # Schedulers mark their optimizer and warn about one without the mark. This one sets it and does no more.
            ConstantLR(new, factor=1.0, total_iters=0)


def class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _carried(group: dict[str, Any], decoupled: bool) -> dict[str, Any]:
    carried = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    if decoupled and carried["weight_decay"]:
        # DecoupledAdamW decays by weight_decay · lr / initial_lr, AdamW by weight_decay · lr.
        carried["weight_decay"] /= group["initial_lr"]
    return carried


def _with_gradients(_optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Composer's closure runs forward and backward, and some optimizers call it under no_grad."""
    optimizer, *closures = args
    enabled = [closure and torch.enable_grad()(closure) for closure in closures]
    return (optimizer, *enabled), {key: value and torch.enable_grad()(value) for key, value in kwargs.items()}
