"""One switch that makes a changed model compute what the untouched model computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn


class _Mode(threading.local):
    # Each thread runs this. It is not a ContextVar, which torch.compile cannot trace.
    def __init__(self) -> None:
        self.now: Literal["untouched", "packed"] | None = None


_mode = _Mode()
_ATTENTION: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """In this thread, run the forward passes of a model as its libraries' own code does.

    Packing, fused layers, captured graphs and replaced norms and attention are off. Weights, adapters, experts and
    precision stay. Results, with the same random numbers, are those of a model that was never changed.

    Args:
        model: The model that is called.
    """
    swapped: list[tuple[Any, str]] = []
    for module in model.modules():
        if module in _ATTENTION:
            config: Any = module.config
            swapped.append((config, config._attn_implementation))
            config._attn_implementation = _ATTENTION[module]
    before, _mode.now = _mode.now, "untouched"
    try:
        yield
    finally:
        _mode.now = before
        for config, implementation in swapped:
            config._attn_implementation = implementation


def is_untouched() -> bool:
    """Whether this thread is inside of :func:`untouched`."""
    return _mode.now == "untouched"


@contextmanager
def with_everything_packed() -> Iterator[None]:
    """In this thread, pack batches although it is not known whether their padding is read, to compare the results."""
    before, _mode.now = _mode.now, "packed"
    try:
        yield
    finally:
        _mode.now = before


def packs_everything() -> bool:
    """Whether this thread is inside of :func:`with_everything_packed`."""
    return _mode.now == "packed"


def remember_attention(model: nn.Module, implementation: str | None) -> None:
    """Note the attention implementation that a transformers model had before it was replaced; None forgets it."""
    if implementation is None:
        _ATTENTION.pop(model, None)
    else:
        _ATTENTION.setdefault(model, implementation)
