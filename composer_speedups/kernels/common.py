"""What the package's own code needs on the host, without Triton: counts of what ran, the base class of its autograd
functions, autocast's dtype for operators that autocast does not cast, and whether Triton finds a C compiler."""

from __future__ import annotations

import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = [
    "FirstDerivative",
    "autocast_dtype",
    "counting",
    "gradient_buffer",
    "missing_c_compiler",
    "ran",
    "to_autocast_dtype",
    "uncounted",
]

_counters: list[Counter[str]] = []  # of the process: backward passes run in threads of autograd


def ran(name: str) -> None:
    """Report that something ran, such as ``"packed_encoder"``. Code that torch.compile traces reports nothing."""
    if not torch.compiler.is_compiling():  # before the list is read: a guard on it would recompile
        for counter in _counters:
            counter[name] += 1


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what is reported, by name, until the context is left. Contexts may overlap, and each counts everything."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]  # equal ones are not the same


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing until the context is left, as for a comparison that runs the same batch again."""
    held, _counters[:] = list(_counters), []
    try:
        yield
    finally:
        _counters[:] = held


class FirstDerivative(torch.autograd.Function):
    """An autograd function without a second derivative.

    Its backward pass raises a RuntimeError with :attr:`refusal` under ``create_graph=True``. torch's
    ``once_differentiable`` does not name the function, and raises nothing if the second derivative is computed by
    ``torch.autograd.grad``, which skips nodes that do not lead to its inputs: this function's share would be missing.
    """

    refusal: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.backward = staticmethod(_once(cls.backward, cls.refusal))  # type: ignore[method-assign, assignment]


def _once(backward: Callable[..., Any], refusal: str) -> Callable[..., Any]:
    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward pass, with create_graph=True only
            raise RuntimeError(refusal)
        return backward(ctx, *gradients)

    return wrapped


def gradient_buffer(parameter: Tensor) -> Tensor | None:
    """The buffer from which a captured step reads a parameter's float32 gradient; None after the first call.

    A kernel that writes there saves a copy. If the parameter is used again, autograd adds the other gradients.
    """
    return vars(parameter).pop("gradient_buffer", None)


def autocast_dtype(device_type: str, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of autocast on a CPU or GPU; ``otherwise`` if autocast is off, and on other devices, such as meta."""
    enabled = device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else otherwise


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast a tensor to the dtype of autocast; without autocast, return it."""
    return x.to(autocast_dtype(x.device.type, x.dtype))


def missing_c_compiler() -> str | None:
    """Return which C compiler Triton does not find, as the end of "needs a C compiler: …"; None if it finds one.

    Triton runs ``$CC`` if it is set, and otherwise gcc or clang.

    Source: triton/runtime/build.py.
    """
    named = os.environ.get("CC")
    if any(map(shutil.which, ["gcc", "clang"] if named is None else [named])):
        return None
    return "neither gcc nor clang is installed" if named is None else f"CC is {named!r}, which is not a program"
