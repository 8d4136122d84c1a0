"""Changes that are given back: process-wide flags, attributes, and the ``forward`` of one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


class ProcessFlag:
    """One process-wide flag, whose value is that of the run that took it last. Runs may give it back in any order; the
    last one restores the value from before the first."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read, self._write = read, write
        self._held: list[tuple[object, Any]] = []  # owner, and the value before it took the flag

    def take(self, owner: object, wanted: Any) -> None:
        """Set the flag. An owner may take it several times, for example for an evaluation during ``fit``."""
        self._held.append((owner, self.read()))
        self._write(wanted)

    def give_back(self, owner: object) -> None:
        """Undo the owner's latest :meth:`take`, if any."""
        index = next((i for i in reversed(range(len(self._held))) if self._held[i][0] is owner), None)
        if index is None:
            return
        _, before = self._held.pop(index)
        if index == len(self._held):
            self._write(before)
        else:
            self._held[index] = self._held[index][0], before

    def release(self, owner: object) -> None:
        while any(held is owner for held, _ in self._held):
            self.give_back(owner)

    @contextmanager
    def held_at(self, wanted: Any) -> Iterator[None]:
        """Set the flag inside a block, in which others may take it."""
        self.take(owner := object(), wanted)
        try:
            yield
        finally:
            self.give_back(owner)


MATMUL_PRECISION = ProcessFlag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)


@contextmanager
def temporary_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# The forward of one module is replaced by an attribute of the module. It is not a closure or a bound method: copies
# would compute with the original module, and it could not be pickled.

Inner = Callable[..., Any] | None  # the ``forward`` that the instance had already; None for the class's


def replace_forward(module: nn.Module, function: Callable[..., Any], *settings: Any) -> partial[Any]:
    """Make ``module.forward(…)`` call ``function(module, inner, *settings, …)``, a function at the top level of a file
    that passes ``module`` and ``inner`` on to :func:`call_inner`; return the new ``forward``."""
    forward = partial(function, module, vars(module).get("forward"), *settings)
    forward.__module__ = __name__  # by which it is known as this package's
    vars(module)["forward"] = forward
    return forward


def call_inner(module: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    """Run the ``forward`` that was replaced."""
    if inner is not None:
        return inner(*args, **kwargs)
    # Not a bound method: compiled code would be specific to one block's method, and could not be reused by the others.
    return type(module).forward(module, *args, **kwargs)


def restore_forward(module: nn.Module) -> None:
    """Undo the last :func:`replace_forward`, unless other code replaced or deleted the ``forward`` since."""
    forward: Any = vars(module).get("forward")
    if isinstance(forward, partial) and vars(forward).get("__module__") == __name__:
        del vars(module)["forward"]
        if forward.args[1] is not None:
            vars(module)["forward"] = forward.args[1]
