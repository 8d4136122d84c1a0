"""Replace AdamW by another optimizer with the same parameters, groups, learning rates and weight decay.

A replacement has a label in its groups and therefore in its checkpoints. Loading the state of another optimizer is
refused in one line, while torch would accept it and fail later, or train with a meaningless state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR

from composer_speedups.surgery.optimizer_hooks import closure_with_gradients

__all__ = [
    "LABEL",
    "UnfitOptimizerError",
    "attach_schedulers",
    "check_label",
    "label_of",
    "swap_optimizer",
]

LABEL = "swapped_to"  # group key with the optimizer's label

Groups = list[dict[str, Any]]
Factory = Callable[[Groups], Optimizer]

_CARRIED = ("params", "lr", "betas", "eps", "weight_decay")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "decoupled_weight_decay")  # settings that do not affect the result
_HOOKS = [
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]
_OTHER_MATHS = ("amsgrad", "maximize", "differentiable")


class UnfitOptimizerError(ValueError):
    """An optimizer cannot be replaced, or a state cannot be loaded. The message has the form "reason; fix"."""

    def __init__(self, reason: str, fix: str) -> None:
        self.reason, self.fix = reason, fix
        super().__init__(f"{reason}; {fix}")


def swap_optimizer(old: Optimizer, label: str, factory: Factory, *, stock_state: bool = False) -> Optimizer:
    """Build another optimizer over the parameters of ``old``, in the same groups.

    Args:
        old: ``torch.optim.AdamW`` (``Adam`` if its settings make it equivalent, or Composer's ``DecoupledAdamW``) that
            has not stepped yet and must not step afterwards.
        label: Names the new optimizer and every setting that its state depends on, for example ``"Adafactor"``.
        factory: Receives a list of groups with ``params``, ``lr``, ``betas``, ``eps`` and ``weight_decay`` (with
            torch's meaning) and returns the new optimizer with the same number of groups in that order. Groups may be
            empty.
        stock_state: The new optimizer's state is a plain AdamW's. Its state dict then has no label, and it loads those
            without one.

    Returns:
        The new optimizer, or ``old`` itself if it already has that label. Each group keeps ``lr``, ``initial_lr``,
        ``weight_decay`` and additional keys; groups that are added later get the defaults of ``old``. It takes over the
        hooks of ``old``. Closures run with gradients enabled, even if the new class calls them without.

    Raises:
        UnfitOptimizerError: ``old`` is another kind of optimizer, has state, or has a setting that would be lost.
    """
    if label_of(old) == label:
        return old
    _check_source(old, label)
    new = factory([_carried(group, old) for group in old.param_groups])
    new.defaults.update(_defaults(old, factory))
    new.defaults[LABEL] = label
    assert len(new.param_groups) == len(old.param_groups)
    for ours, theirs in zip(new.param_groups, old.param_groups, strict=True):
        assert all(a is b for a, b in zip(ours["params"], theirs["params"], strict=True))
        known = {*_CARRIED, *_IMPLEMENTATION, *_OTHER_MATHS}
        ours.update({key: value for key, value in theirs.items() if key not in known})
        ours[LABEL] = label
    for hooks in _HOOKS:  # the dicts themselves, so that the user's handles still remove them
        getattr(old, hooks).update(getattr(new, hooks))
        setattr(new, hooks, getattr(old, hooks))
        setattr(old, hooks, OrderedDict())
    new.register_step_pre_hook(closure_with_gradients)
    if stock_state:
        new.register_state_dict_post_hook(_remove_label)
        new.register_load_state_dict_pre_hook(lambda _, state: _with_label(state, label))
    new.register_load_state_dict_pre_hook(lambda _, state: _check_groups(state["param_groups"], label))
    return new


def label_of(optimizer: Optimizer) -> str | None:
    """The label of a replacement; None for any other optimizer."""
    return next((group.get(LABEL) for group in optimizer.param_groups), None)


def check_label(optimizer: Optimizer, label: str) -> None:
    """Check a state after loading it, for optimizers whose ``load_state_dict`` does not run hooks.

    Raises:
        UnfitOptimizerError: The state was written by another optimizer.
    """
    _check_groups(optimizer.param_groups, label)


def attach_schedulers(schedulers: Iterable[Any], old: Optimizer, new: Optimizer) -> list[str]:
    """Make torch schedulers that were built on ``old``, nested ones included, set the learning rates of ``new``.

    Returns:
        Class names of the changed schedulers.

    Raises:
        UnfitOptimizerError: A scheduler cycles momentum, which ``new`` does not have or stores differently.
    """
    attached = []
    for scheduler in _with_inner(schedulers):
        if getattr(scheduler, "optimizer", None) is not old:
            continue
        name = type(scheduler).__name__
        if getattr(scheduler, "cycle_momentum", False) and "betas" not in new.param_groups[0]:
            raise UnfitOptimizerError(
                f"{name} cycles betas, which {type(new).__qualname__} does not have", "set cycle_momentum=False"
            )
        scheduler.optimizer = new
        attached.append(name)
    if attached and not hasattr(new.step, "_wrapped_by_lr_sched"):
        # Schedulers mark their optimizer and warn about one without the mark. This temporary scheduler sets it, and
        # does not change learning rates.
        ConstantLR(new, factor=1.0, total_iters=0)
    return attached


def _with_inner(schedulers: Iterable[Any]) -> Iterable[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_inner(getattr(scheduler, "_schedulers", ()))  # SequentialLR and ChainedScheduler


def _check_source(old: Optimizer, label: str) -> None:
    fix = "use torch.optim.AdamW"
    name = f"{type(old).__module__}.{type(old).__qualname__}"
    if label_of(old) is not None:
        raise UnfitOptimizerError(
            f"the optimizer is already {label_of(old)}, and {label} was requested", "pass a new torch.optim.AdamW"
        )
    if type(old) not in (Adam, AdamW) and not _is_decoupled_adamw(old):
        raise UnfitOptimizerError(f"{name} is not AdamW, whose settings are needed", fix)
    if any(len(state) for state in old.state.values()):
        raise UnfitOptimizerError(
            f"{name} has already stepped, and its state would be lost", "replace it before training"
        )
    for group in old.param_groups:
        decoupled = type(old) is not Adam or group.get("decoupled_weight_decay", False)
        if group["weight_decay"] and not decoupled:
            raise UnfitOptimizerError(f"{name} mixes weight decay into the gradient, and AdamW does not", fix)
        if isinstance(group["lr"], torch.Tensor):
            raise UnfitOptimizerError(f"{name} keeps its learning rate in a tensor", "give it as a float")
        if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
            raise UnfitOptimizerError(f"{name} keeps its betas in tensors", "give them as floats")
        lost = next((key for key in _OTHER_MATHS if group.get(key)), None)
        if lost is not None:
            raise UnfitOptimizerError(f"{name} has {lost}=True, which would be lost", f"set {lost}=False")
        unfit = next((p.dtype for p in group["params"] if not torch.is_floating_point(p)), None)
        if unfit is not None:
            raise UnfitOptimizerError(f"{name} has {unfit} parameters", "train floating-point parameters only")


def _is_decoupled_adamw(optimizer: Optimizer) -> bool:
    """Whether it is Composer's DecoupledAdamW. Composer need not be installed."""
    kind = type(optimizer)
    return kind.__name__ == "DecoupledAdamW" and kind.__module__.startswith("composer.optim.")


def _carried(group: dict[str, Any], old: Optimizer) -> dict[str, Any]:
    carried = {key: group[key] for key in _CARRIED}
    carried["params"] = list(carried["params"])
    if _is_decoupled_adamw(old) and carried["weight_decay"]:
        # DecoupledAdamW decays by weight_decay · lr / initial_lr, AdamW by weight_decay · lr.
        if not group["initial_lr"]:
            raise UnfitOptimizerError(
                "DecoupledAdamW with a learning rate of 0 decays weights in a way that no other optimizer can",
                "use torch.optim.AdamW",
            )
        carried["weight_decay"] /= group["initial_lr"]
    return carried


def _defaults(old: Optimizer, factory: Factory) -> dict[str, Any]:
    """The settings, by their names in the new optimizer, of a group that has none of its own."""
    parameters = [p for group in old.param_groups for p in group["params"]]
    settings = {**old.defaults, "params": parameters, "initial_lr": old.defaults["lr"] or 1.0}
    (group,) = factory([_carried(settings, old)]).param_groups
    # torchao makes a tensor of the learning rate, which each group must have for itself
    return {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k not in ("params", "step")}


def _remove_label(_optimizer: Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group.pop(LABEL, None)


def _with_label(state: dict[str, Any], label: str) -> dict[str, Any]:
    return state | {"param_groups": [{LABEL: label} | group for group in state["param_groups"]]}


def _check_groups(groups: Groups, label: str) -> None:
    labels = {group.get(LABEL) or "another optimizer" for group in groups if group["params"]}
    if labels - {label}:
        raise UnfitOptimizerError(
            f"the loaded state belongs to {', '.join(sorted(labels))}, and this optimizer is {label}",
            "load a state written by the same one, or the model's weights only",
        )
