"""torch's sync debug mode, for tests of what must not wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["no_waiting"]


@contextmanager
def no_waiting(*, strict: bool = True) -> Iterator[None]:
    """Within, whatever waits for the GPU raises; with ``strict=False`` nothing does, as at a first step."""
    torch.cuda.set_sync_debug_mode("error" if strict else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
