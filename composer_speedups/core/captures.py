"""Seconds that captures of CUDA graphs take in this process; apart, so that reading them imports little."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["capture_seconds", "capturing"]

_seconds = 0.0


def capture_seconds() -> float:
    """Of all captures so far, their warm-up included."""
    return _seconds


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Around a capture."""
    global _seconds
    start = time.perf_counter()
    yield
    _seconds += time.perf_counter() - start
