"""What a run writes down of its config: values from elsewhere as they were asked for, and no credentials."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from composer_speedups.core.credentials import MASK, mask
from composer_speedups.train.config.schema import Config

__all__ = ["find_masked", "interpolations", "written"]

Path = tuple[str | int, ...]
_MISSING = object()


def written(config: Config) -> dict[str, Any]:
    """The config as config.yaml, report.json and loggers have it.

    A value that was given as ``${oc.env:NAME}`` is that text again: the environment may hold what nobody else is to
    see. Of the others, what looks like a credential is masked.
    """
    values = dataclasses.asdict(config)
    for path, (text, value) in config.interpolations.items():
        if _at(values, path) == value:  # else it was changed since
            _at(values, path[:-1])[path[-1]] = text
    masked: dict[str, Any] = mask(values)
    return masked


def interpolations(config: Config, raw: Any) -> dict[Path, tuple[str, Any]]:
    """Which values of a config were given as ``${…}``: path → the text, and what it stood for.

    Args:
        config: All of them resolved.
        raw: Nested as the config, nothing resolved.
    """
    values = dataclasses.asdict(config)
    found = {path: (text, _at(values, path)) for path, text in _leaves(raw) if isinstance(text, str) and "${" in text}
    return {path: pair for path, pair in found.items() if pair[1] is not _MISSING}


def find_masked(config: Config) -> str | None:
    """The first key whose value was masked when it was written down; None where there is none."""
    leaves = _leaves(dataclasses.asdict(config))
    return next((".".join(map(str, path)) for path, value in leaves if isinstance(value, str) and MASK in value), None)


def _leaves(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(values, (dict, list)):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _leaves(value, (*path, key))
    else:
        yield path, values


def _at(values: Any, path: Path) -> Any:
    for key in path:
        inside = isinstance(values, dict) and key in values
        if not inside and not (isinstance(values, list) and isinstance(key, int) and key < len(values)):
            return _MISSING
        values = values[key]
    return values
