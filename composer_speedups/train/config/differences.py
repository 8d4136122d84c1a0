"""Whether a run's config.yaml describes the same training as a config. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from composer_speedups.train.config.load import written
from composer_speedups.train.config.schema import Config

UNSET = object()
"""The value of a key that only the other config has."""
# Keys that may differ, because they affect neither the weights nor the values that reports compare. The
# name of a section covers all its keys.
_IGNORED_KEYS = (
    "runs_folder export plot baseline callbacks loggers "
    "trainer.progress_bar trainer.on_out_of_memory trainer.dist_timeout "
    "data.pin_memory data.prefetch_factor data.cache_dir "
    "checkpoint.interval checkpoint.keep checkpoint.autoresume checkpoint.trust_checkpoint"
).split()


def differences(config: Config, stored: Path) -> list[tuple[str, Any, Any]] | None:
    """The dotted keys whose values differ and affect the weights or the values that reports compare.

    Configs are compared as they are written to disk (see :func:`.written`): ``${oc.env:NAME}`` equals itself for any
    value of the variable.

    Args:
        config: The current config.
        stored: The config.yaml of a run.

    Returns:
        Key, stored value and current value of each difference, in the order of the keys; None if the file cannot be
        read.
    """
    before = stored_values(stored)
    if before is None:
        return None
    now, defaults = dict(_flat(written(config))), dict(_flat(Config(task=type(config.task)()).model_dump()))
    # a key that the stored file lacks, since the version that wrote it did not have it, had its default
    both = {
        name: [v.get(name, defaults.get(name, UNSET)) for v in (before, now)] for name in before.keys() | now.keys()
    }
    return [
        (name, old, new)
        for name, (old, new) in sorted(both.items())
        if old != new and not any(f"{name}.".startswith(f"{key}.") for key in _IGNORED_KEYS)
    ]


def stored_values(stored: Path) -> dict[str, Any] | None:
    """Dotted key → value, from a config.yaml; None if it cannot be read."""
    try:
        return dict(_flat(yaml.safe_load(stored.read_text())))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        return None


def _flat(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
