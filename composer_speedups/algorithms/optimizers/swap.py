"""Change the implementation of a torch optimizer, or replace AdamW by another optimizer with the same parameters,
groups, learning rates and weight decay.

A replacement has a label in its groups and therefore in its checkpoints. Loading the state of another optimizer is
refused in one line, while torch would accept it and fail later, or train with a meaningless state.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR

LABEL = "swapped_to"  # group key with the optimizer's label

Groups = list[dict[str, Any]]
Defaults = dict[str, Any]
Factory = Callable[[Groups, Defaults, nn.Module], Optimizer]

_CARRIED = ("lr", "betas", "eps", "weight_decay")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "decoupled_weight_decay")  # settings that do not affect the result
_OTHER_MATHS = ("amsgrad", "maximize", "differentiable")
_HOOKS = [
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


class UnfitOptimizerError(ValueError):
    """An optimizer cannot be changed, or did not do what it should. The message has the form "reason; fix"."""

    def __init__(self, reason: str, fix: str) -> None:
        self.reason, self.fix = reason, fix
        super().__init__(f"{reason}; {fix}")


def set_implementation(optimizer: Optimizer, flag: str) -> Optimizer:
    """Make a torch optimizer step with its ``"foreach"`` or ``"fused"`` implementation.

    The object, its groups and its state stay, so schedulers and checkpoints are not affected. Call it again after
    loading a state dict, which restores the flags that it was written with.

    Raises:
        UnfitOptimizerError: The optimizer does not have the implementation, or torch's constructor would refuse it for
            these parameters and settings. Nothing is changed.
    """
    kind: Any = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if flag not in optimizer.defaults or not name.startswith("torch.optim."):
        raise UnfitOptimizerError(f"{name} has no {flag} implementation", "use torch.optim.AdamW")
    flags = {"foreach": flag == "foreach", "fused": flag == "fused"}
    accepted = inspect.signature(kind).parameters.keys() - {"params"}
    for group in optimizer.param_groups:
        if flag == "fused" and not all(map(torch.is_floating_point, group["params"])):
            raise UnfitOptimizerError(f"{name} has parameters that cannot be fused", "train floating-point parameters")
        if group.get("differentiable"):
            raise UnfitOptimizerError(f"{name} does not support {flag} with differentiable=True", "set it to False")
        settings = {key: value for key, value in group.items() if key in accepted}
        try:
            kind(group["params"] or [nn.Parameter(torch.empty(0))], **settings | flags)
        except (ValueError, RuntimeError) as error:
            reason = f"{name} refuses {flag}=True ({error})"
            raise UnfitOptimizerError(reason, "give numbers instead of tensors") from error
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group.update(flags)
    optimizer._step_supports_amp_scaling = flags["fused"]  # type: ignore[attr-defined]  # as torch's constructor does
    for group in optimizer.param_groups:
        for parameter in group["params"]:  # torch keeps step counts on the parameter's device for fused kernels only
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor) and not group.get("capturable"):
                state["step"] = state["step"].to(parameter.device if flags["fused"] else "cpu", torch.float32)
    return optimizer


def replaced(old: Optimizer, label: str, factory: Factory, model: nn.Module, *, stock_state: bool = False) -> Optimizer:
    """Build another optimizer over the parameters of ``old``, in the same groups.

    Args:
        old: ``torch.optim.AdamW`` (``Adam`` if its settings make it equivalent, or Composer's ``DecoupledAdamW``) that
            has not stepped yet and must not step afterwards.
        label: Names the new optimizer and every setting that its state depends on.
        factory: Receives groups with ``params``, ``lr``, ``betas``, ``eps`` and ``weight_decay`` (with torch's
            meaning), the defaults of these settings, and the model, which it may change. Returns an optimizer with
            groups of the same parameters in that order, after which it may add others. Groups may be empty.
        model: The model of these parameters.
        stock_state: The new optimizer's state is a plain AdamW's. Its state dict then has no label, and it loads those
            without one.

    Returns:
        The new optimizer, or ``old`` itself if it already has that label. Each group keeps ``lr``, ``initial_lr``,
        ``weight_decay`` and additional keys. It takes over the hooks of ``old``. Closures run with gradients enabled,
        even if the new class calls them without.

    Raises:
        UnfitOptimizerError: ``old`` is another kind of optimizer, has state, or has a setting that would be lost.
    """
    if label_of(old) == label:
        return old
    _check_source(old, label)
    defaults = _carried({"initial_lr": old.defaults["lr"] or 1.0, **old.defaults}, old)
    groups = [{"params": list(group["params"]), **_carried(group, old)} for group in old.param_groups]
    new = factory(groups, defaults, model)
    new.defaults[LABEL] = label
    for ours, theirs in zip(new.param_groups, old.param_groups, strict=True):
        assert all(a is b for a, b in zip(ours["params"], theirs["params"], strict=False))
        known = {"params", *_CARRIED, *_IMPLEMENTATION, *_OTHER_MATHS}
        ours.update({key: value for key, value in theirs.items() if key not in known})
        ours[LABEL] = label
    for hooks in _HOOKS:  # the dicts themselves, so that the user's handles still remove them
        getattr(old, hooks).update(getattr(new, hooks))
        setattr(new, hooks, getattr(old, hooks))
        setattr(old, hooks, OrderedDict())
    # Composer's closure runs forward and backward, and some optimizers call it under no_grad.
    new.register_step_pre_hook(lambda _, args, kwargs: with_closure(args, kwargs, torch.enable_grad()))
    if stock_state:
        new.register_state_dict_post_hook(_without_label)
        new.register_load_state_dict_pre_hook(
            lambda _, state: state | {"param_groups": [{LABEL: label} | group for group in state["param_groups"]]}
        )
    new.register_load_state_dict_pre_hook(lambda _, state: _check_groups(state["param_groups"], label))
    return new


def label_of(optimizer: Optimizer) -> str | None:
    """The label of a replacement; None for any other optimizer."""
    return next((group.get(LABEL) for group in optimizer.param_groups), None)


def check_label(optimizer: Optimizer, label: str) -> None:
    """Check a loaded state, for optimizers whose ``load_state_dict`` runs no hooks, such as bitsandbytes'.

    Raises:
        UnfitOptimizerError: The state was written by another optimizer.
    """
    _check_groups(optimizer.param_groups, label)


def _check_groups(groups: Groups, label: str) -> None:
    if others := {group.get(LABEL) or "another optimizer" for group in groups if group["params"]} - {label}:
        raise UnfitOptimizerError(
            f"the loaded state belongs to {', '.join(sorted(others))}, and this optimizer is {label}",
            "load a state written by the same one, or the model's weights only",
        )


def attach_schedulers(schedulers: Iterable[Any], old: Optimizer, new: Optimizer) -> None:
    """Make torch schedulers that were built on ``old``, nested ones included, set the learning rates of ``new``.

    Raises:
        UnfitOptimizerError: A scheduler cycles momentum, which ``new`` does not have or stores differently.
    """
    for scheduler in schedulers:
        attach_schedulers(getattr(scheduler, "_schedulers", ()), old, new)  # of SequentialLR and ChainedScheduler
        if old is new or getattr(scheduler, "optimizer", None) is not old:
            continue
        if getattr(scheduler, "cycle_momentum", False) and "betas" not in new.param_groups[0]:
            raise UnfitOptimizerError(
                f"{type(scheduler).__name__} cycles betas, which {type(new).__qualname__} does not have",
                "set cycle_momentum=False",
            )
        scheduler.optimizer = new
        if not hasattr(new.step, "_wrapped_by_lr_sched"):
            # Schedulers mark their optimizer and warn about one without the mark. This one sets it and does no more.
            ConstantLR(new, factor=1.0, total_iters=0)


def with_closure(args: Any, kwargs: Any, wrap: Callable[[Any], Any]) -> tuple[Any, Any] | None:
    """Wrap the closure among the arguments that a step's pre-hook receives; None, for unchanged ones, without one."""
    if len(args) > 1 and args[1] is not None:
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    return None


def _without_label(_optimizer: Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group.pop(LABEL, None)


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
        raise UnfitOptimizerError(f"{name} has stepped, and its state would be lost", "replace it before training")
    for group in old.param_groups:
        if group["weight_decay"] and type(old) is Adam and not group.get("decoupled_weight_decay", False):
            raise UnfitOptimizerError(f"{name} mixes weight decay into the gradient, and AdamW does not", fix)
        if any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"])):
            raise UnfitOptimizerError(f"{name} keeps its learning rate or betas in tensors", "give them as floats")
        if lost := [key for key in _OTHER_MATHS if group.get(key)]:
            raise UnfitOptimizerError(f"{name} has {lost[0]}=True, which would be lost", f"set {lost[0]}=False")
        if unfit := [p.dtype for p in group["params"] if not torch.is_floating_point(p)]:
            raise UnfitOptimizerError(f"{name} has {unfit[0]} parameters", "train floating-point parameters only")
        if any(isinstance(p, DTensor) for p in group["params"]):
            raise UnfitOptimizerError(f"{name} has parameters that are sharded across ranks", "train without FSDP")


def _is_decoupled_adamw(optimizer: Optimizer) -> bool:
    """Whether it is Composer's DecoupledAdamW. Composer need not be installed."""
    kind = type(optimizer)
    return kind.__name__ == "DecoupledAdamW" and kind.__module__.startswith("composer.optim.")


def _carried(group: dict[str, Any], old: Optimizer) -> dict[str, Any]:
    carried = {key: group[key] for key in _CARRIED}
    if _is_decoupled_adamw(old) and carried["weight_decay"]:
        # DecoupledAdamW decays by weight_decay · lr / initial_lr, AdamW by weight_decay · lr.
        if not group["initial_lr"]:
            reason = "DecoupledAdamW with a learning rate of 0 decays weights in a way that no other optimizer can"
            raise UnfitOptimizerError(reason, "use torch.optim.AdamW")
        carried["weight_decay"] /= group["initial_lr"]
    return carried
