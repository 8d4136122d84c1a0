"""The ``tune.*`` keys of the command line: typed, bounded, and refused in one line like those of the config."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_speedups.core.errors import ConfigError, did_you_mean, first_line
from composer_speedups.core.settings import Origins, field_docs, key
from composer_speedups.train.config.checks import check_bounds

__all__ = ["Kind", "TuneConfig", "help_text", "read_settings"]

Kind = Literal["exact", "rounding", "lower_precision", "recipe"]
"""What a technique does to the numbers, from bit for bit the same to another training recipe."""

_PREFIX = "tune."
_LINE = "command line"
_ALLOWED = ("lower_precision", "recipe")

_USAGE = """\
usage: python -m composer_speedups.tune -f FILE [key=value ...] [tune.NAME=VALUE ...]

Measure the techniques on this machine for the run that FILE and the key=value pairs describe, and write a YAML with
the fastest set, the measured reasons, and what was left out and why. FILE itself stays as it is.

exit status: 0 a YAML was written; 1 the given run fails; 2 a bad key, config or dataset, said on one line.

keys:
"""


@dataclass
class TuneConfig:
    budget_seconds: float = key(300.0, ge=1, le=604_800)
    """Seconds for all measurements together; what could not be tried by then is named in the YAML."""
    output: str | None = None
    """YAML to write, and beside it a .json with all trials; null is FILE's name with .tuned.yaml, in this folder."""
    allow: list[str] | None = None
    """Which of lower_precision and recipe may change; null: lower_precision where FILE trains in 16 bits already."""
    steps: int | None = key(None, ge=5, le=100_000)
    """Training steps a trial; null takes as many as leave time for about twenty trials, 8 to 200."""
    repeats: int = key(2, ge=2, le=20)
    """Runs of FILE at the start, if a third of the time holds them, whose spread is the noise; pairs at the end."""
    min_gain: float = key(0.02, ge=0, lt=1)
    """Fraction of the planned run's time that a technique must save at least, however small the noise."""
    batch_sizes: bool | None = None
    """With the time left, measure 2, 4 and 8 times the batch size; reported, never written. null: on a GPU only."""


def read_settings(overrides: Sequence[str]) -> tuple[TuneConfig, list[str]]:
    """The ``tune.*`` pairs of a command line, and the other pairs, which are the config's.

    Raises:
        ConfigError: One line that names the key and, where there is one, the nearest known key.
    """
    known = [field.name for field in dataclasses.fields(TuneConfig)]
    merged, rest = OmegaConf.structured(TuneConfig), []
    for override in overrides:
        dotted, _, text = override.partition("=")
        if dotted != "tune" and not dotted.startswith(_PREFIX):
            rest.append(override)
            continue
        name = dotted.removeprefix(_PREFIX)
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)  # names are long, and cut short
            hint = f"; did you mean '{_PREFIX}{close[0]}'?" if close else f"; known: {', '.join(known)}"
            raise ConfigError(f"{_LINE}: unknown key {dotted!r}{hint}")
        if name == "allow" and text.strip() in _ALLOWED:
            raise ConfigError(f"{_LINE}: tune.allow takes a list, as in tune.allow=[{text.strip()}]")
        try:
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([f"{name}={text}"]))
        except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
            raise ConfigError(f"{_LINE}: {dotted}: {first_line(error)}") from error
    settings = OmegaConf.to_object(merged)
    assert isinstance(settings, TuneConfig)
    check_bounds(settings, Origins(_LINE), _PREFIX)
    for name in settings.allow or ():
        if name not in _ALLOWED:
            raise ConfigError(f"{_LINE}: tune.allow does not take {name!r}{did_you_mean(name, _ALLOWED)}")
    return settings, rest


def help_text() -> str:
    """Usage and every ``tune.*`` key with its type, default and doc line."""
    docs, hints = field_docs(TuneConfig), typing.get_type_hints(TuneConfig)
    lines = []
    for field in dataclasses.fields(TuneConfig):
        default = "null" if field.default is None else field.default
        spelt = getattr(hints[field.name], "__name__", None) if not typing.get_args(hints[field.name]) else None
        kind = spelt or str(hints[field.name]).replace("None", "null").replace(" ", "")
        lines += [f"  {_PREFIX}{field.name}: {kind} = {default}", f"      {docs[field.name]}"]
    return _USAGE + "\n".join(lines) + "\n\nAll other keys are those of composer train.py --help.\n"
