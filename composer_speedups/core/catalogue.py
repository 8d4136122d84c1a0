"""The available techniques and the keys that each task reads, known without importing torch.

A technique is a folder with a module of the same name that defines one subclass of ``Technique``. What ``--help`` and
the package's lazy namespace need to know of the techniques is in the generated file ``_catalogue.json``;
``python -m benchmarks.render`` writes it from the classes. Further folders can be added to
``composer_speedups.algorithms.__path__``: their techniques, which the file does not list, are imported instead.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from composer_speedups.core.settings import help_lines

__all__ = [
    "FILE",
    "Description",
    "describe",
    "description_of",
    "folder_of",
    "keys_by_task",
    "public_names",
    "technique_names",
]

FILE = Path(__file__).parents[1] / "_catalogue.json"


class Description(NamedTuple):
    name: str
    class_name: str
    summary: str  # first line of the class's docstring
    functions: list[str]  # ``__all__`` of functional.py
    help: list[str]  # two lines for each setting, without on_unavailable, which every technique has


def technique_names() -> list[str]:
    """YAML names of all techniques, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(_folders()) if module.ispkg)


def folder_of(name: str) -> Path:
    """The folder of a technique's modules and card."""
    return next(folder for path in _folders() if (folder := Path(path) / name).is_dir())


def _folders() -> list[str]:
    return list(importlib.import_module("composer_speedups.algorithms").__path__)


@cache
def _generated() -> dict[str, Any]:
    catalogue: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"techniques": {}, "tasks": {}}
    return catalogue


def describe() -> list[Description]:
    """Every technique; those that the generated file lists are not imported."""
    return [_describe(name) for name in technique_names()]


def _describe(name: str) -> Description:
    entry = _generated()["techniques"].get(name)
    return description_of(name) if entry is None else Description(name, **entry)


def description_of(name: str) -> Description:
    """A technique from its class, which is imported."""
    folder = f"composer_speedups.algorithms.{name}"
    module, functional = (importlib.import_module(f"{folder}.{file}") for file in (name, "functional"))
    cls = next(c for c in vars(module).values() if isinstance(c, type) and vars(c).get("name") == name)
    lines = list(help_lines(cls, omit="on_unavailable"))
    return Description(name, cls.__name__, (cls.__doc__ or "").split("\n")[0], sorted(functional.__all__), lines)


@cache
def public_names() -> dict[str, str]:
    """Name of each public class and function → its module, for ``from composer_speedups import …``."""
    public = {}
    for technique in describe():
        folder = f"composer_speedups.algorithms.{technique.name}"
        public[technique.class_name] = f"{folder}.{technique.name}"
        public |= dict.fromkeys(technique.functions, f"{folder}.functional")
    return public


def keys_by_task() -> dict[str, list[str]]:
    """Task → the keys under ``data`` and ``model`` that it reads, of those that not every task reads."""
    keys: dict[str, list[str]] = _generated()["tasks"]
    return keys
