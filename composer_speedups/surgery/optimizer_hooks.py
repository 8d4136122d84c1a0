"""Hooks around the update of an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["start_after_closure"]


def start_after_closure(args: Any, kwargs: Any, start: Callable[[], None]) -> tuple[Any, Any] | None:
    """Call ``start`` before an optimizer's update: at once, or after the step's closure, if it has one.

    Args:
        args, kwargs: Arguments of the optimizer's step pre-hook; ``args[0]`` is the optimizer.
        start: Called without arguments.

    Returns:
        The arguments with which the step continues; None for unchanged ones.
    """
    positional = len(args) > 1
    closure = args[1] if positional else kwargs.get("closure")
    if closure is None:
        start()
        return None

    def closure_then_start(*inner: Any, **keywords: Any) -> Any:
        loss = closure(*inner, **keywords)
        start()
        return loss

    if positional:
        return (args[0], closure_then_start, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_then_start}
