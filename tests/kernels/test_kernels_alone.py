"""The kernels are usable without the rest of the package; test_kernels runs the example in their docstring."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from composer_speedups import kernels

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


def test_the_package_docstring_names_every_public_function() -> None:
    for path in FOLDER.glob("*.py"):
        module = ast.parse(path.read_text())
        if path.stem in ("__init__", "dropout"):
            continue
        public = next(
            ast.literal_eval(n.value)
            for n in module.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        )
        plain = [n.name for n in module.body if isinstance(n, ast.FunctionDef) and not n.decorator_list]
        for name in set(public) & set(plain) - {
            "targets_of",
            "launches",
            "backward_programs",
            "multiprocessors",
            "strips_and_groups",
        }:
            assert name in str(kernels.__doc__), f"{path.stem}.{name}"
