"""Process-wide flags and attributes that are set for a while and given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ProcessFlag:
    """One process-wide flag, and the runs that currently hold it. The run that took it last determines its value.

    Runs may release it in any order. The value to restore is passed on to the next holder, and the last one restores
    the value from before the first.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read, self._write = read, write
        self._held: list[tuple[object, Any]] = []  # owner, and the value before it took the flag

    def take(self, owner: object, wanted: Any) -> None:
        """Set the flag. An owner may take it several times, for example for an evaluation during ``fit``."""
        self._held.append((owner, self.read()))
        self._write(wanted)

    def give_back(self, owner: object) -> None:
        """Undo the owner's latest :meth:`take`, if any."""
        index = next((i for i in reversed(range(len(self._held))) if self._held[i][0] is owner), None)
        if index is None:
            return
        _, before = self._held.pop(index)
        if index == len(self._held):
            self._write(before)
        else:
            self._held[index] = self._held[index][0], before

    def release(self, owner: object) -> None:
        """Undo every :meth:`take` of an owner."""
        while any(held is owner for held, _ in self._held):
            self.give_back(owner)


MATMUL_PRECISION = ProcessFlag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)


@contextmanager
def temporary_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute that ``owner`` has to ``value`` inside the block, and restore it afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
