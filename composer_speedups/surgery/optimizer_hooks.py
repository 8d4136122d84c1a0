"""Hooks before an optimizer's step that change its closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["closure_with_gradients", "start_after_closure"]

Closure = Callable[..., Any]
Arguments = tuple[Any, Any]  # the positional and keyword arguments of a step; the first is the optimizer


def start_after_closure(args: Any, kwargs: Any, start: Callable[[], None]) -> Arguments | None:
    """Call ``start`` before an optimizer's update: at once, or after the step's closure, if it has one.

    Args:
        args, kwargs: Arguments of the optimizer's step pre-hook.
        start: Called without arguments.

    Returns:
        The arguments with which the step continues; None for unchanged ones.
    """

    def then_start(closure: Closure) -> Closure:
        def closure_then_start(*inner: Any, **keywords: Any) -> Any:
            loss = closure(*inner, **keywords)
            start()
            return loss

        return closure_then_start

    changed = _with_closure(args, kwargs, then_start)
    if changed is None:
        start()
    return changed


def closure_with_gradients(_optimizer: Any, args: Any, kwargs: Any) -> Arguments | None:
    """Enable gradients in the closure, a step pre-hook. Composer's closure runs forward and backward, and some
    optimizers call it under ``no_grad``."""
    return _with_closure(args, kwargs, torch.enable_grad())


def _with_closure(args: Any, kwargs: Any, wrap: Callable[[Closure], Closure]) -> Arguments | None:
    """Wrap the closure among a step's arguments; None without one."""
    if len(args) > 1 and args[1] is not None:
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    return None
