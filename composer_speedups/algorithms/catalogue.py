"""What techniques there are, read from the folders beside this file without importing them.

A technique is a folder that holds a module of the same name with one subclass of ``Technique`` in it.
"""

from __future__ import annotations

import ast
import pkgutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Description", "describe", "public_names", "technique_names"]

_HERE = Path(__file__).parent


class Description(NamedTuple):
    name: str
    class_name: str
    summary: str  # first line of the class's doc string
    settings: list[str]  # "scope: Literal['model', 'blocks'] = 'model'"


def technique_names() -> list[str]:
    """YAML names of all techniques, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules([str(_HERE)]) if module.ispkg)


def describe() -> list[Description]:
    """One entry a technique, from its source alone: ``--help`` must not wait for torch to be imported."""
    return [_describe(name) for name in technique_names()]


@cache
def public_names() -> dict[str, str]:
    """Class and function name → module, for ``from composer_speedups import …``."""
    modules = {d.name: f"composer_speedups.algorithms.{d.name}.{d.name}" for d in describe()}
    return {d.class_name: modules[d.name] for d in describe()} | {
        f"apply_{name}": module for name, module in modules.items()
    }


def _describe(name: str) -> Description:
    tree = ast.parse((_HERE / name / f"{name}.py").read_text())
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and _is_technique(n))
    init = next(
        (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"),
        None,
    )
    settings = []
    if init is not None:
        args, defaults = init.args.args[1:], init.args.defaults
        for arg, default in zip(args, defaults, strict=True):
            annotation = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
            settings.append(f"{arg.arg}{annotation} = {ast.unparse(default)}")
    summary = (ast.get_docstring(cls) or "").split("\n")[0]
    return Description(name, cls.name, summary, settings)


def _is_technique(cls: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id.endswith("Technique") for base in cls.bases)
