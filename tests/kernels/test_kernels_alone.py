"""The kernels are usable without the rest of the package, and refuse second derivatives by name."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import composer_speedups
from composer_speedups import kernels
from composer_speedups.kernels.common import FirstDerivative
from tests.conftest import ROOT


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


FOLDER = Path(kernels.__file__).parent


@pytest.mark.parametrize("module", sorted(path.name for path in FOLDER.glob("*.py")))
def test_kernel_modules_import_only_torch_triton_and_kernels(module: str) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse((FOLDER / module).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    ours = {name for name in imported if name.startswith("composer_speedups")}
    assert all(name.startswith("composer_speedups.kernels") for name in ours)
    assert {name.partition(".")[0] for name in imported - ours} <= {"torch", "triton", *sys.stdlib_module_names}


def test_the_page_of_the_kernels_shows_every_public_function() -> None:
    page = (ROOT / "docs/api/kernels.md").read_text().split()
    for path in FOLDER.glob("*.py"):
        module = ast.parse(path.read_text())
        public = next(
            ast.literal_eval(n.value)
            for n in module.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        )
        plain = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name in public and not n.decorator_list]
        if path.stem not in ("__init__", "dropout"):
            assert f"composer_speedups.kernels.{path.stem}" in page
            assert all(map(ast.get_docstring, plain)), path.stem
