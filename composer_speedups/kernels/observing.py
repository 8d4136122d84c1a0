"""Count what this package's own code runs, while somebody observes a batch; otherwise this costs one look at a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["counting", "ran", "uncounted"]

_counters: list[Counter[str]] = []  # of the process: backward passes run in threads of autograd


def ran(name: str) -> None:
    """Report that something ran, such as ``"packed_encoder"``. Code that torch.compile traces reports nothing."""
    if not torch.compiler.is_compiling():  # before the list is read: a guard on it would recompile
        for counter in _counters:
            counter[name] += 1


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what is reported, by name, until the context is left. Contexts may overlap, and each counts everything."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]  # equal ones are not the same


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing until the context is left, as for a comparison that runs the same batch again."""
    held, _counters[:] = list(_counters), []
    try:
        yield
    finally:
        _counters[:] = held
