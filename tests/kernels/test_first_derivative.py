"""Second derivatives: functions that gather, scatter or run kernels refuse them by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import composer_speedups
from composer_speedups.kernels.host import FirstDerivative


class Square(FirstDerivative):
    """x² with a backward pass that autograd does not see, as a kernel's."""

    refusal = "square has no second derivative; use x * x"

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: None) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x.detach() * grad, None


@pytest.mark.parametrize("outer", [torch.sum, lambda y: (y**3).sum()], ids=["constant", "varying"])
def test_the_first_derivative_is_unchanged_and_the_second_is_refused(outer: Any) -> None:
    """Whether the incoming gradient is a constant, for which torch's ``once_differentiable`` raises nothing, or not."""
    x = torch.tensor([0.5, -1.5], requires_grad=True)
    (gradient,) = torch.autograd.grad(outer(Square.apply(x, None)), x)
    (expected,) = torch.autograd.grad(outer(x * x), x)
    torch.testing.assert_close(gradient, expected)
    for differentiate in (
        lambda total: torch.autograd.grad(total, x, create_graph=True),
        lambda total: total.backward(create_graph=True),
    ):
        with pytest.raises(RuntimeError, match=r"^square has no second derivative; use x \* x$"):
            differentiate(outer(Square.apply(x, None)))


def test_every_function_refuses() -> None:
    classes = {}
    for path in Path(composer_speedups.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                classes[node.name] = path
    assert classes.keys() == {"FirstDerivative"}, "derive from FirstDerivative"
