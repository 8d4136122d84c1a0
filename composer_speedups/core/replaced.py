"""One name of another's module, exchanged for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, ``owner.name`` is ``value``.

    Raises:
        AttributeError: ``owner`` has no such name, in another version of its package.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
