"""The available techniques and the keys that each task reads, known without importing torch.

A technique is a folder with a module of the same name that defines one subclass of ``Technique``. A folder whose
package lists several names as ``TECHNIQUES`` has a module that defines a subclass for each. What ``--help`` and
the package's lazy namespace need to know of the techniques is in the generated file ``_catalogue.json``;
``python -m benchmarks.render`` writes it from the classes. Further folders can be added to
``composer_speedups.algorithms.__path__``: their techniques, which the file does not list, are imported instead.
"""

from __future__ import annotations

import importlib
import importlib.util
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
    "module_of",
    "public_names",
    "technique_names",
]

FILE = Path(__file__).parents[1] / "_catalogue.json"


class Description(NamedTuple):
    name: str
    class_name: str
    summary: str  # first line of the class's docstring
    functions: list[str]  # ``__all__`` of functional.py, if there is one
    help: list[str]  # two lines for each setting, without on_unavailable, which every technique has


def technique_names() -> list[str]:
    """YAML names of all techniques, sorted."""
    return sorted(_modules())


def module_of(name: str) -> str:
    """The module that defines a technique's class."""
    return _modules()[name]


def folder_of(name: str) -> Path:
    """The folder of a technique's modules and card."""
    folder = _modules()[name].rpartition(".")[2]
    return next(found for path in _folders() if (found := Path(path) / folder).is_dir())


def _modules() -> dict[str, str]:
    modules: dict[str, str] = {}
    for folder in (found.name for found in pkgutil.iter_modules(_folders()) if found.ispkg):
        package = importlib.import_module(f"composer_speedups.algorithms.{folder}")
        modules |= dict.fromkeys(getattr(package, "TECHNIQUES", (folder,)), f"{package.__name__}.{folder}")
    return modules


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
    module = importlib.import_module(module_of(name))
    cls = next(c for c in vars(module).values() if isinstance(c, type) and vars(c).get("name") == name)
    functional, functions = _functional(name), []
    if importlib.util.find_spec(functional) is not None:
        functions = sorted(importlib.import_module(functional).__all__)
    lines = list(help_lines(cls, omit="on_unavailable"))
    return Description(name, cls.__name__, (cls.__doc__ or "").split("\n")[0], functions, lines)


def _functional(name: str) -> str:
    return f"{module_of(name).rpartition('.')[0]}.functional"


@cache
def public_names() -> dict[str, str]:
    """Name of each public class and function → its module, for ``from composer_speedups import …``."""
    public = {}
    for technique in describe():
        public[technique.class_name] = module_of(technique.name)
        public |= dict.fromkeys(technique.functions, _functional(technique.name))
    return public


def keys_by_task() -> dict[str, list[str]]:
    """Task → the keys under ``data`` and ``model`` that it reads, of those that not every task reads."""
    keys: dict[str, list[str]] = _generated()["tasks"]
    return keys
