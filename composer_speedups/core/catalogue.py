"""What techniques there are, read from the folders under ``algorithms`` without importing them.

A technique is a folder that holds a module of the same name with one subclass of ``Technique`` in it.
"""

from __future__ import annotations

import ast
import pkgutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Description", "describe", "public_names", "technique_names"]

_ALGORITHMS = Path(__file__).parent.parent / "algorithms"


class Description(NamedTuple):
    name: str
    class_name: str
    summary: str  # first line of the class's doc string
    settings: list[str]  # "scope: Literal['model', 'blocks'] = 'model'"


def technique_names() -> list[str]:
    """YAML names of all techniques, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules([str(_ALGORITHMS)]) if module.ispkg)


def describe() -> list[Description]:
    """One entry a technique, from its source alone: ``--help`` must not wait for torch to be imported."""
    return [_describe(name) for name in technique_names()]


@cache
def public_names() -> dict[str, str]:
    """Class and function name → module, for ``from composer_speedups import …``.

    The functions are those in ``__all__`` of a technique's ``functional.py``, which needs no Composer.
    """
    public = {}
    for description in describe():
        folder = f"composer_speedups.algorithms.{description.name}"
        public[description.class_name] = f"{folder}.{description.name}"
        public |= dict.fromkeys(_names_in_all(description.name), f"{folder}.functional")
    return public


def _names_in_all(name: str) -> list[str]:
    """``__all__`` of a technique's functions."""
    tree = ast.parse((_ALGORITHMS / name / "functional.py").read_text())
    return next(
        ast.literal_eval(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and n.targets[0].id == "__all__"
    )


def _describe(name: str) -> Description:
    tree = ast.parse((_ALGORITHMS / name / f"{name}.py").read_text())
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
