"""Whether Composer's training loop is the one that this package relies on, and whether anything may read gradients
between the backward pass and the optimizer's step, and so needs them complete."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from composer import Trainer
from composer.core import State
from torch.optim import optimizer as torch_optimizer

from composer_speedups.core.host import Host
from composer_speedups.core.technique import Technique

TESTED_COMPOSER = "0.32.1"  # whose loop has the source that docs/internals.md lists and the tests compare
# Events, and methods of callbacks and of the Trainer, that run between the backward pass and the step.
_EVENTS = ("after_backward", "after_train_batch")
_CALLBACK_METHODS = ("run_event", *_EVENTS)
_TRAINER_METHODS = ("_train_batch", "_train_microbatches", "_train_microbatch")

Method = TypeVar("Method", bound=Callable[..., Any])


def other_composer() -> str | None:
    """The installed version of Composer, such as ``0.33.0``; None if it is the tested one."""
    installed = version("mosaicml")
    return None if installed == TESTED_COMPOSER else installed


def is_defined_in_composer(method: Any) -> bool:
    """Whether a function or method is defined in Composer, and not in code that replaces or wraps it, other than
    ``lean_dispatch``, whose replacement has Composer's function as an attribute."""
    function = getattr(method, "__func__", method)
    function = getattr(function, "composers", function)
    defined_in = getattr(function, "__globals__", {}).get("__name__", "")  # functools.wraps copies __module__, not this
    return str(defined_in).partition(".")[0] == "composer"


def reads_no_gradients(method: Method) -> Method:
    """Declare that a method which runs between the backward pass and the step does not read gradients.

    For ``after_backward``, ``after_train_batch`` and ``run_event`` of a callback, and for methods of your own Trainer.
    A subclass that overrides the method must declare it again.
    """
    method.reads_gradients = False  # type: ignore[attr-defined]
    return method


def reader_of_gradients(state: State, closure: Callable[[], Any] | None) -> str | None:
    """The first thing found that may read gradients before the optimizer's step, to which Composer's loop passes
    ``closure``; None if nothing does.

    The allowed code is Composer's Trainer and callbacks, techniques that handle no event between the two, and methods
    declared with :func:`reads_no_gradients`.
    """
    if other := other_composer():
        return f"the training loop of composer {other}"
    trainer = inspect.getclosurevars(closure).nonlocals.get("self") if closure is not None else None
    if not isinstance(trainer, Trainer):
        return "a training loop that is not Composer's"
    for listener, names in [
        (trainer, _TRAINER_METHODS),
        *((callback, _CALLBACK_METHODS) for callback in state.callbacks),
    ]:
        for name in names:
            if isinstance(listener, Host) and not any(map(listener.hears, _EVENTS)):
                continue
            method = getattr(listener, name)
            if not is_defined_in_composer(method) and getattr(method, "reads_gradients", True):
                return f"{type(listener).__name__}.{name}"
    for algorithm in state.algorithms:
        if not isinstance(algorithm, Technique):  # it may match any event; techniques are called by their host
            return type(algorithm).__name__
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in state.model.parameters()):
        return "a hook on a parameter's gradient"
    shared = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    for optimizer in state.optimizers:
        hooks = (*shared, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        if any(getattr(hook, "reads_gradients", True) for kind in hooks for hook in kind.values()):
            return f"a hook on {type(optimizer).__name__}.step"
    return None
