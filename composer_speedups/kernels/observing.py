"""Count what this package's own code runs, while somebody observes a batch; otherwise this costs one comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["counting", "ran"]

_counter: Counter[str] | None = None  # of the process: backward passes run in threads of autograd


def ran(name: str) -> None:
    """Report that something ran, such as ``"packed_encoder"``. Code that torch.compile traces reports nothing."""
    if torch.compiler.is_compiling() or _counter is None:  # in this order: a guard on the counter would recompile
        return
    _counter[name] += 1


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what is reported, by name, until the context is left. An inner context counts for the outer one, too."""
    global _counter
    outer, _counter = _counter, Counter()
    inner = _counter
    try:
        yield inner
    finally:
        _counter = outer
        if outer is not None:
            outer.update(inner)
