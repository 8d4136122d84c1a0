"""Whether Composer's training loop is the one that this package relies on and was tested with."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

TESTED_COMPOSER = "0.32.1"
"""The version whose loop has the source that docs/internals.md lists and the tests compare."""


def other_composer() -> str | None:
    """Return the installed version of Composer, such as ``0.33.0``; None if it is the tested one."""
    installed = version("mosaicml")
    return None if installed == TESTED_COMPOSER else installed


def is_defined_in_composer(method: Any) -> bool:
    """Whether a function or method is defined in Composer, and not in code that replaces or wraps it."""
    function = getattr(method, "__func__", method)
    defined_in = getattr(function, "__globals__", {}).get("__name__", "")  # functools.wraps copies __module__, not this
    return str(defined_in).partition(".")[0] == "composer"
