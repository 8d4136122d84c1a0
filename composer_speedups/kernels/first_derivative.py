"""The base class of autograd functions whose backward pass autograd cannot differentiate again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

__all__ = ["FirstDerivative"]


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
