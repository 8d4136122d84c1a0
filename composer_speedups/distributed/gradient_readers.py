"""Find code that may read gradients between the backward pass and the optimizer's step, and so needs them complete."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from composer import Trainer
from composer.core import Algorithm, Callback, Event, State
from torch.optim import Optimizer
from torch.optim import optimizer as torchs

from composer_speedups.core.technique import Technique
from composer_speedups.distributed.composer_loop import unknown_methods

__all__ = ["reader_of_gradients", "reads_no_gradients"]

_EVENTS = (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH)  # events between the two
# methods of the Trainer that run between the two
_METHODS = ("_train_batch", "_train_microbatches", "_train_microbatch")

Method = TypeVar("Method", bound=Callable[..., Any])


def reads_no_gradients(method: Method) -> Method:
    """Declare that a method which runs between the backward pass and the step does not read gradients.

    For ``after_backward`` and ``after_train_batch`` of a callback, and for methods of your own Trainer. A subclass that
    overrides the method must declare it again.
    """
    method.reads_gradients = False  # type: ignore[attr-defined]
    return method


def reader_of_gradients(state: State, closure: Callable[[], Any] | None) -> str | None:
    """Describe the first thing found that may read gradients before the optimizer's step; None if nothing does.

    It inspects the code of Composer's training loop, the Trainer's methods, all algorithms and callbacks that handle an
    event between the two, and hooks on parameters, optimizers and their steps.

    Args:
        state: The Trainer's state with everything registered.
        closure: The closure that Composer's loop passes to the optimizer's step.
    """
    return next(_readers(state, closure), None)


def _readers(state: State, closure: Callable[[], Any] | None) -> Iterator[str]:
    if unknown := unknown_methods(_METHODS):
        yield f"{unknown}: what it does between"
    trainer = inspect.getclosurevars(closure).nonlocals.get("self") if closure is not None else None
    if not isinstance(trainer, Trainer):
        yield "a training loop that is not Composer's"
    for name in _METHODS:
        if _may_read(getattr(trainer, name, None), getattr(Trainer, name)):
            yield f"{type(trainer).__name__}.{name}"
    yield from (type(algorithm).__name__ for algorithm in state.algorithms if _hears(algorithm, state))
    for callback in state.callbacks:
        for name in ("run_event", *(event.value for event in _EVENTS)):
            if _may_read(getattr(callback, name), getattr(Callback, name)):
                yield f"{type(callback).__name__}.{name}"
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in state.model.parameters()):
        yield "a hook on a parameter's gradient"
    yield from (f"a hook on {type(each).__name__}.step" for each in state.optimizers if _has_hooks(each))


def _may_read(method: Any, composers: Any) -> bool:
    function = getattr(method, "__func__", method)
    return function is not composers and getattr(function, "reads_gradients", True)


def _hears(algorithm: Algorithm, state: State) -> bool:
    # Other algorithms may match any event; techniques handle a fixed set.
    return not isinstance(algorithm, Technique) or any(algorithm.match(event, state) for event in _EVENTS)


def _has_hooks(optimizer: Optimizer) -> bool:
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*hooks, torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks))
