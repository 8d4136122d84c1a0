"""YAML name → technique class, for train.py, the package's namespace and the tests.

Techniques are discovered by their folders (see :mod:`.catalogue`), so adding one does not change any list.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from composer_speedups.core.catalogue import module_of, technique_names
from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.core.settings import Origins
from composer_speedups.core.technique import Technique

__all__ = ["build_techniques", "technique_class"]


@cache
def technique_class(name: str) -> type[Technique]:
    """The class with a YAML name.

    Raises:
        ConfigError: No technique has this name; the message suggests the closest one.
    """
    if name not in technique_names():
        raise ConfigError(f"unknown technique {name!r}{did_you_mean(name, technique_names())}")
    module = importlib.import_module(module_of(name))
    classes = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, Technique) and c.__module__ == module.__name__ and c.name == name
    ]
    assert len(classes) == 1, f"{module.__name__} must define exactly one Technique with the name {name!r}"
    return classes[0]


def build_techniques(
    settings: Mapping[str, Any], on_unavailable: str = "stop", origins: Origins | None = None
) -> list[Technique]:
    """Build the techniques of a config's ``algorithms`` section.

    Args:
        settings: YAML name → settings, or None for the defaults.
        on_unavailable: Default for techniques that do not set it themselves.
        origins: Dotted key → where it was set, for error messages.

    Raises:
        ConfigError: An unknown technique or setting, or an invalid value.
    """

    built = []
    for name, values in settings.items():
        prefix = f"algorithms.{name}."
        built.append(technique_class(name).read({"on_unavailable": on_unavailable, **(values or {})}, prefix, origins))
    return built
