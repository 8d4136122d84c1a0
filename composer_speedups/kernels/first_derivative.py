"""The base class of autograd functions whose backward pass is kernels, which autograd cannot differentiate again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["FirstDerivative"]


class FirstDerivative(torch.autograd.Function):
    """An autograd function without a second derivative.

    Autograd does not see what kernels write, so under ``create_graph=True`` a second backward pass would silently leave
    out this function's share. It raises a RuntimeError with :attr:`refusal` instead. torch's ``once_differentiable``
    does not name the function, and raises nothing from ``torch.autograd.grad``, which skips nodes that do not lead to
    its inputs.
    """

    refusal: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.backward = staticmethod(_once(cls.backward, cls.refusal))  # type: ignore[method-assign, assignment]


def _once(backward: Callable[..., tuple[Any, ...]], refusal: str) -> Callable[..., tuple[Any, ...]]:
    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            computed = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # autograd enables gradients in a backward pass for create_graph=True only
            return computed
        known = [gradient for gradient in gradients if isinstance(gradient, Tensor) and gradient.requires_grad]
        sources = [*known, *_leaves(ctx)]
        return tuple(_Refusal.apply(refusal, g, *sources) if isinstance(g, Tensor) else g for g in computed)

    return wrapped


def _leaves(node: Any) -> list[Tensor]:
    """The leaves of autograd's graph on which a node's inputs depend.

    Saved tensors are no substitute: not all inputs are saved, and a checkpointed region unpacks them only once.
    """
    leaves: dict[int, Tensor] = {}
    seen, waiting = set[Any](), [node]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            waiting.append(following)
            if (leaf := getattr(following, "variable", None)) is not None:  # it accumulates a leaf's gradient
                leaves[id(leaf)] = leaf
    return [*leaves.values()]


class _Refusal(torch.autograd.Function):
    """Passes a gradient on, and raises if autograd differentiates it with respect to one of its sources."""

    @staticmethod
    def forward(ctx: Any, refusal: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.refusal = refusal
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise RuntimeError(ctx.refusal)
