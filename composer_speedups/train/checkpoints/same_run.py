"""Whether an interrupted run may go on under a config: what differs from its own, but for what changes no result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from composer_speedups.core.credentials import mask
from composer_speedups.core.errors import ConfigError
from composer_speedups.train.config import Config, written

__all__ = ["began_with_same_load", "check_same_run"]

# Keys that change neither the weights nor what the report compares; a section stands for all that it holds.
_FREE = (
    "runs_folder bytecode export plot callbacks loggers "
    "trainer.progress_bar trainer.on_out_of_memory trainer.dist_timeout "
    "data.pin_memory data.prefetch_factor data.worker_timeout data.cache_dir "
    "checkpoint.interval checkpoint.keep checkpoint.autoresume checkpoint.trust_checkpoint"
).split()
_MISSING = object()


def check_same_run(config: Config, stored: Path) -> None:
    """Refuse to go on with a run under another config.

    Both are compared as runs write them down (see :func:`.written`): ``${oc.env:NAME}`` is the same whatever the
    environment holds, and so is an address with another password.

    Args:
        config: Of now.
        stored: The config.yaml of the interrupted run.

    Raises:
        ConfigError: A key that matters differs; it is named with both values. A longer ``trainer.max_duration`` is no
            difference.
    """
    way_out = "to go on, give what it had; or another run_name, or checkpoint.autoresume=false to start anew"
    try:
        before = _read(stored)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise ConfigError(
            f"run_name: {config.run_name!r} was interrupted, and its {stored} cannot be read; give another "
            "run_name, or checkpoint.autoresume=false to start anew"
        ) from error
    # Earlier versions stored what interpolations stood for.
    now, resolved = dict(_flat(written(config))), dict(_flat(mask(asdict(config))))
    defaults = dict(_flat(asdict(Config())))
    for name in sorted(before.keys() | now.keys()):
        old, new = (values.get(name, defaults.get(name, _MISSING)) for values in (before, now))
        if old in (new, resolved.get(name, new)) or any(name == free or name.startswith(f"{free}.") for free in _FREE):
            continue
        if name == "trainer.max_duration" and _longer(old, new):
            continue
        raise ConfigError(
            f"run_name: {config.run_name!r} was interrupted under another config, {name}={_spell(old)} and not "
            f"{_spell(new)}; {way_out}"
        )


def began_with_same_load(config: Config, stored: Path) -> bool:
    """Whether the interrupted run was begun with the same ``checkpoint.load``; not where its file cannot be read."""
    try:
        before = _read(stored).get("checkpoint.load")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        return False
    return before in (mask(config.checkpoint.load), written(config)["checkpoint"]["load"])


def _read(stored: Path) -> dict[str, Any]:
    return dict(_flat(mask(yaml.safe_load(stored.read_text()))))  # earlier versions masked nothing


def _flat(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _longer(old: Any, new: Any) -> bool:
    """Whether one Composer time is longer than another in the same unit."""
    times = [re.fullmatch(r"(\d+)([a-z]+)", str(value)) for value in (old, new)]
    if times[0] is None or times[1] is None:
        return False
    return times[0][2] == times[1][2] and int(times[0][1]) < int(times[1][1])


def _spell(value: Any) -> str:
    return "nothing" if value is _MISSING else "null" if value is None else str(value)
