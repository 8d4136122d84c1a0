"""Replace an attribute of a class or module for the duration of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporary_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` inside the ``with`` block, and restore it afterwards.

    Raises:
        AttributeError: ``owner`` does not have that attribute, for example in another version of its package.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
