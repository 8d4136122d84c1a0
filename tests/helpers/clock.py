"""A clock that tests control."""

from __future__ import annotations

from typing import Any

__all__ = ["Clock"]


class Clock:
    """Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_during(self, target: Any, name: str, seconds: float) -> None:
        """Every call of a method takes so many seconds more."""
        original = getattr(target, name)

        def slower(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return original(*args, **kwargs)

        setattr(target, name, slower)
