"""The one time limit of the tests. It ends a process that hangs; no test depends on how busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

HANGS = 1800.0
"""Seconds after which a process is taken to hang. The slowest test takes minutes on an idle machine with two cores."""


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Wait until ``condition()`` holds; fail with ``what`` if it still does not hold after :data:`HANGS` seconds."""
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, f"after {HANGS:.0f} s: {what}"
        time.sleep(0.02)
