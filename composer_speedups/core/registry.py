"""YAML name → technique class, for the configuration, the package's namespace and the tests.

A technique is a folder under ``algorithms`` with a module of the same name, which declares it without importing torch
or Composer. Further folders can be added to ``composer_speedups.algorithms.__path__``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.core.technique import Technique


@cache
def _classes() -> dict[str, type[Technique]]:
    found = {}
    for folder in pkgutil.iter_modules(importlib.import_module("composer_speedups.algorithms").__path__):
        module = importlib.import_module(f"composer_speedups.algorithms.{folder.name}.{folder.name}")
        for kind in vars(module).values():
            declared = inspect.isclass(kind) and issubclass(kind, Technique) and kind.__module__ == module.__name__
            if declared and "name" in vars(kind):  # otherwise a base class
                found[kind.name] = kind
    return dict(sorted(found.items()))


def technique_names() -> list[str]:
    return list(_classes())


def technique_class(name: str) -> type[Technique]:
    """The class with a YAML name; an unknown name is refused with the closest one."""
    if name not in _classes():
        raise ConfigError(f"unknown technique {name!r}{did_you_mean(name, _classes())}")
    return _classes()[name]


def folder_of(name: str) -> Path:
    """The folder of a technique's modules and card."""
    return Path(inspect.getfile(technique_class(name))).parent


def build_techniques(settings: Mapping[str, Any], on_unavailable: str = "stop") -> list[Technique]:
    """Build the techniques of a config's ``algorithms`` section: YAML name → settings, or None for the defaults."""
    return [
        technique_class(name).read({"on_unavailable": on_unavailable, **(values or {})}, f"algorithms.{name}.")
        for name, values in settings.items()
    ]
