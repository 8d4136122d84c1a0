"""The available techniques, read from the folders under ``algorithms`` without importing them.

A technique is a folder with a module of the same name that defines one subclass of ``Technique``. Further folders can
be added to ``composer_speedups.algorithms.__path__``.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from composer_speedups.core.settings import annotated

__all__ = ["Description", "SettingDescription", "describe", "folder_of", "public_names", "technique_names"]

_PACKAGE = Path(__file__).parent.parent


class SettingDescription(NamedTuple):
    name: str
    hint: str  # type as in YAML: "model|blocks", "int|null"
    default: Any
    bounds: dict[str, Any]  # "ge", "gt", "le" and "lt"
    doc: str  # the string below the setting, on one line


class Description(NamedTuple):
    name: str
    class_name: str
    summary: str  # first line of the class's docstring
    settings: list[SettingDescription]  # without on_unavailable, which every technique has


def technique_names() -> list[str]:
    """YAML names of all techniques, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(_folders()) if module.ispkg)


def folder_of(name: str) -> Path:
    """The folder of a technique's modules and card."""
    return next(folder for path in _folders() if (folder := Path(path) / name).is_dir())


def _folders() -> list[str]:
    return list(importlib.import_module("composer_speedups.algorithms").__path__)


def describe() -> list[Description]:
    """Describe each technique from its source code, so that ``--help`` does not have to import torch."""
    return [_describe(name) for name in technique_names()]


@cache
def public_names() -> dict[str, str]:
    """Name of each public class and function → its module, for ``from composer_speedups import …``.

    The functions are those in ``__all__`` of each technique's ``functional.py``.
    """
    public = {}
    for name in technique_names():
        folder = f"composer_speedups.algorithms.{name}"
        public[_class_of(_tree(folder_of(name) / f"{name}.py")).name] = f"{folder}.{name}"
        functions = ast.literal_eval(_value_of("__all__", folder_of(name) / "functional.py"))
        public |= dict.fromkeys(functions, f"{folder}.functional")
    return public


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _class_of(tree: ast.Module) -> ast.ClassDef:
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and any(b.endswith("Technique") for b in _bases(n)))


def _bases(cls: ast.ClassDef) -> list[str]:
    return [base.id for base in cls.bases if isinstance(base, ast.Name)]


def _describe(name: str) -> Description:
    file = folder_of(name) / f"{name}.py"
    cls = _class_of(_tree(file))
    settings = [s for s in _settings(cls.name, file) if s.name != "on_unavailable"]
    return Description(name, cls.name, (ast.get_docstring(cls) or "").split("\n")[0], settings)


def _settings(class_name: str, file: Path) -> Iterator[SettingDescription]:
    """The ``NAME: hint = Field(default, …)`` settings in the body of the class, then those of its base classes."""
    cls = next((n for n in _tree(file).body if isinstance(n, ast.ClassDef) and n.name == class_name), None)
    if cls is None:
        return
    for name, field, doc in annotated(cls):
        if _is_field(field.value):
            default = _constant(field.value.args[0], file)
            bounds = {str(keyword.arg): _constant(keyword.value, file) for keyword in field.value.keywords}
            yield SettingDescription(name, _hint(field.annotation, file), default, bounds, doc)
    for base in _bases(cls):
        if (module := _module_of(base, file)) is not None:
            yield from _settings(base, module)


def _is_field(value: ast.expr | None) -> TypeGuard[ast.Call]:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field"


def _module_of(name: str, file: Path) -> Path | None:
    """The file of this package that a name is imported from; None if it comes from another package."""
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(a.name == name for a in node.names):
            package, _, rest = node.module.partition(".")
            return _PACKAGE.joinpath(*rest.split(".")).with_suffix(".py") if package == _PACKAGE.name else None
    return None


def _value_of(name: str, file: Path) -> ast.expr:
    """The value assigned to a module-level name, in this module or in the one that it is imported from."""
    for node in _tree(file).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return node.value
    module = _module_of(name, file)
    assert module is not None, f"{file}: {name} must be a constant of this package"
    return _value_of(name, module)


def _constant(node: ast.expr, file: Path) -> Any:
    return ast.literal_eval(_value_of(node.id, file) if isinstance(node, ast.Name) else node)


def _hint(node: ast.expr, file: Path) -> str:
    """A type in YAML's terms: ``Literal["a", "b"] | None`` is ``a|b|null``."""
    if isinstance(node, ast.BinOp):
        return f"{_hint(node.left, file)}|{_hint(node.right, file)}"
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        options = ast.literal_eval(node.slice)
        return "|".join(map(str, options if isinstance(options, tuple) else (options,)))
    if isinstance(node, ast.Constant):
        return "null"
    if isinstance(node, ast.Name) and node.id not in ("int", "float", "bool", "str", "Any"):
        return _hint(_value_of(node.id, file), file)  # an alias such as Check
    return ast.unparse(node)
