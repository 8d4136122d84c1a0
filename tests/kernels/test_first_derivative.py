"""Second derivatives: gathers and scatters have one, and functions that run kernels refuse by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import composer_speedups
from composer_speedups.algorithms.cuda_graphs.capture import _Link, _Replay
from composer_speedups.kernels.first_derivative import FirstDerivative
from composer_speedups.packing.layout import lay_out


class Square(FirstDerivative):
    """x² with a backward pass that autograd does not see, as a kernel's."""

    refusal = "square has no second derivative; use x * x"

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: None) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        assert not torch.is_grad_enabled()
        (x,) = ctx.saved_tensors
        return 2 * x.detach() * grad, None


def test_the_first_derivative_is_unchanged() -> None:
    x = torch.tensor([1.0, -3.0], requires_grad=True)
    for create_graph in (False, True):
        (gradient,) = torch.autograd.grad(Square.apply(x, None).sum(), x, create_graph=create_graph)
        assert gradient.tolist() == [2.0, -6.0]
        assert gradient.requires_grad == create_graph


@pytest.mark.parametrize("outer", [torch.sum, lambda y: (y**3).sum()], ids=["constant", "varying"])
def test_the_second_derivative_is_refused(outer: Any) -> None:
    """By torch.autograd.grad and backward(), for each input, and if the incoming gradient is a constant."""
    leaf = torch.tensor([0.5, -1.5], requires_grad=True)
    for differentiate in (lambda total: torch.autograd.grad(total, leaf), lambda total: total.backward()):
        (gradient,) = torch.autograd.grad(outer(Square.apply(leaf * 2, None)), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=r"^square has no second derivative; use x \* x$"):
            differentiate((gradient + leaf).square().sum())
    x = torch.tensor([1.0, -3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(outer(Square.apply(x, None)), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^square has no second derivative; use x \* x$"):
        torch.autograd.grad((gradient + x).square().sum(), x)


def test_a_replayed_graph_refuses_it() -> None:
    class Captured:
        output_gradients = (True,)

        def forward(self, inputs: Any) -> tuple[Tensor, ...]:
            return (inputs[0].detach() * 2,)

        def backward(self, gradients: Any) -> tuple[Tensor, ...]:
            return (gradients[0] * 2,)

    x = torch.ones(2, requires_grad=True)
    (out,) = _Replay.apply(Captured(), None, x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert gradient.tolist() == [8.0, 8.0]
    with pytest.raises(
        RuntimeError, match=r"^cuda_graphs replays gradients, .*create_graph=True.*; release the graphs"
    ):
        torch.autograd.grad(gradient.sum(), x)
    assert issubclass(_Link, FirstDerivative)


def test_every_function_refuses_or_is_made_of_torchs_operators() -> None:
    differentiable = {"_Gather", "_Scatter", "_Refusal", "FirstDerivative"}
    refusing = {"_AccumulatingReplay"}  # refuses create_graph=True itself, as tests of cuda_graphs show
    classes = {}
    for path in Path(composer_speedups.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                classes[node.name] = path
    assert classes.keys() == differentiable | refusing, (
        "derive from FirstDerivative, or test the second derivative here"
    )


@pytest.mark.parametrize("power", [1, 3])
def test_gathers_and_scatters_have_second_derivatives(power: int) -> None:
    plan = lay_out(torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]), 6, 8)
    slots, used = plan.mask_BS.numel(), plan.indices_T < plan.mask_BS.numel()
    generator = torch.Generator().manual_seed(0)

    def sample(rows: int) -> Tensor:
        return torch.randn(rows, 3, dtype=torch.double, generator=generator).requires_grad_()

    def gathered(x: Tensor) -> Tensor:
        return plan.gather(x.view(3, 4, 3))[used] ** power  # what the other entries gather is never read

    def scattered(x: Tensor) -> Tensor:
        return plan.scatter(x).flatten(0, 1) ** power

    for function, x in ((gathered, sample(slots)), (scattered, sample(len(used)))):
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))
