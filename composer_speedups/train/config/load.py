"""YAML file + ``key=value`` → a checked :class:`Config`, or a :class:`ConfigError` that names the key."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import io
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_speedups.core.credentials import MASK
from composer_speedups.core.errors import ConfigError, UserError, first_line
from composer_speedups.core.files import write_atomically
from composer_speedups.core.settings import Origins
from composer_speedups.train.config.checks import check_bounds, check_together
from composer_speedups.train.config.schema import Config
from composer_speedups.train.config.written import find_masked, interpolations, written
from composer_speedups.train.config.yaml_text import MOST_NESTED, check_nesting, fault_in, read_yaml_text

__all__ = [
    "CommandLine",
    "load_config",
    "load_with_origins",
    "parse_command_line",
    "save_config",
    "schema_keys",
    "section_of",
]

COMMAND_LINE = "command line"


class CommandLine(NamedTuple):
    file: str | None
    overrides: list[str]
    help: bool


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """``-f FILE``, ``key=value`` and ``--help``; anything else is refused."""
    file, overrides, wants_help = None, [], False
    rest = iter(argv)
    for arg in rest:
        if arg in ("-h", "--help"):
            wants_help = True
        elif arg in ("-f", "--file"):
            if file is not None:
                raise ConfigError(f"{COMMAND_LINE}: {arg} is given twice; name one config file")
            file = next(rest, None)
            if file is None:
                raise ConfigError(f"{COMMAND_LINE}: {arg} needs a file, as in -f yamls/quickstart.yaml")
        elif "=" in arg.lstrip("=") and not arg.startswith("-"):
            overrides.append(arg)
        else:
            raise ConfigError(f"{COMMAND_LINE}: cannot read {arg!r}; expected -f FILE or key=value")
    return CommandLine(file, overrides, wants_help)


def load_config(file: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of :func:`load_with_origins`."""
    return load_with_origins(file, overrides)[0]


def load_with_origins(
    file: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> tuple[Config, Origins]:
    """Read, merge and check a config.

    Args:
        file: YAML file; None starts from the defaults.
        overrides: ``key=value`` strings, the value in YAML; later ones win. ``algorithms.NAME=null``
            takes a technique out.

    Returns:
        The config, and for each key the file or command line that set it.

    Raises:
        ConfigError: One line that names the key, the nearest known key, and the file.
    """
    merged = _defaults()
    origin_of = Origins(COMMAND_LINE if file is None else str(file))
    if file is not None:
        merged = _merge(merged, _read_yaml(file), str(file), origin_of)
    for override in overrides:
        merged = _merge(merged, _read_override(override), COMMAND_LINE, origin_of)
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise _explain(error, origin_of.otherwise) from error
    assert isinstance(config, Config)
    config.algorithms = {
        name: {} if settings is True else settings
        for name, settings in config.algorithms.items()
        if settings is not None and settings is not False
    }
    config.interpolations = interpolations(config, OmegaConf.to_container(merged, resolve=False))
    if (name := find_masked(config)) is not None:
        raise ConfigError(
            f"{origin_of[name]}: {name} holds {MASK} in place of a credential, as runs write it down; give the value "
            "itself, best as ${oc.env:NAME}"
        )
    check_bounds(config, origin_of)
    check_together(config, origin_of)
    return config, origin_of


@cache
def _defaults() -> Any:
    return OmegaConf.structured(Config)


def save_config(config: Config, path: Path, *, credentials: bool = False) -> None:
    """Write a config that ``-f`` reads back.

    Args:
        config: As :func:`load_config` gave it.
        path: The YAML file.
        credentials: Write what a run uses, for a file that only this process's own reads. Otherwise it is what
            :func:`.written` leaves of it; ``-f`` asks for those that were masked.
    """
    content = dataclasses.asdict(config) if credentials else written(config)
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(content)))


def schema_keys(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every dotted key with its field and type, sections before what they hold."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name, field, hints[field.name]
        section = section_of(hints[field.name])
        if section is not None:
            yield from schema_keys(section, f"{prefix}{field.name}.")


def section_of(hint: Any) -> type | None:
    """The dataclass behind ``Section`` or ``Section | None``; None for a plain value."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((o for o in options if dataclasses.is_dataclass(o) and isinstance(o, type)), None)


def _read_yaml(file: str | os.PathLike[str]) -> DictConfig:
    try:
        text = read_yaml_text(file)
        loaded = OmegaConf.load(io.StringIO(text))
        empty = not loaded and not isinstance(yaml.compose(text, yaml.SafeLoader), yaml.CollectionNode)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if empty:  # OmegaConf's {} would train the default model on the default dataset
        raise ConfigError(f"{file}: the file is empty, or has comments only; start from yamls/quickstart.yaml")
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{file}: must hold keys and values at its top, not a {type(loaded).__name__}")
    return loaded


def _read_override(override: str) -> DictConfig:
    name, _, value = override.partition("=")
    if not all(name.split(".")) or name.count(".") >= MOST_NESTED:
        raise ConfigError(f"{COMMAND_LINE}: {name[:80]!r} is not a key; expected section.key=value")
    try:
        check_nesting(value)
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{COMMAND_LINE}: the value of {name} is not valid YAML: {error}") from error


def _merge(base: Any, new: DictConfig, origin: str, origin_of: Origins) -> Any:
    raw = OmegaConf.to_container(new, resolve=False)
    assert isinstance(raw, dict)
    if fault := fault_in(raw):
        raise ConfigError(f"{origin}: {fault}")
    if "algorithms" in raw:
        raw["algorithms"] = _algorithms_as_mapping(raw["algorithms"], origin)
        if not raw["algorithms"]:
            base = copy.deepcopy(base)  # the defaults are there for others too
            base.algorithms = {}
    _check_keys(raw, Config, "", origin)
    origin_of.update(dict.fromkeys(_dotted(raw), origin))
    try:
        return OmegaConf.merge(base, raw)
    except (OmegaConfBaseException, OverflowError, TypeError, ValueError) as error:
        raise _explain(error, origin, raw) from error


def _algorithms_as_mapping(value: Any, origin: str) -> dict[str, Any]:
    """``[a, {b: {x: 1}}]`` and ``{a: {}, b: {x: 1}}`` mean the same."""
    if value is None:
        return {}
    items: list[tuple[Any, Any]] = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, Mapping):
            items += entry.items()
        elif isinstance(entry, str) and isinstance(value, list):
            items.append((entry, {}))
        else:
            raise ConfigError(f"{origin}: algorithms must hold technique names, not {entry!r}")
    names = [name for name, _ in items]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{origin}: algorithms names {twice!r} twice; name it once")
    for name, settings in items:
        if not isinstance(name, str):
            raise ConfigError(f"{origin}: algorithms must hold technique names, not {name!r}")
        if settings is not None and not isinstance(settings, (dict, bool)):
            raise ConfigError(f"{origin}: algorithms.{name} must be a mapping of settings, not {settings!r}")
    return dict(items)


def _check_keys(raw: Mapping[Any, Any], cls: type, prefix: str, origin: str) -> None:
    hints = typing.get_type_hints(cls)
    for name, value in raw.items():
        dotted = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(f"{origin}: unknown key {dotted!r}{nearest(dotted)}")
        section = section_of(hints[name])
        if section is not None and value is not None:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{origin}: {dotted} is a section of keys and cannot be {value!r}")
            _check_keys(value, section, f"{dotted}.", origin)


def nearest(dotted: str) -> str:
    """``; did you mean 'data.batch_size'?`` for ``data.bach_size``, or a pointer to the list of keys."""
    known = [name for name, _, _ in schema_keys()]
    close = difflib.get_close_matches(dotted, known, n=1, cutoff=0.75)
    if not close:  # the right name in the wrong section
        leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        close = [leaves[m] for m in difflib.get_close_matches(dotted.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.7)]
    return f"; did you mean {close[0]!r}?" if close else "; composer train.py --help lists all keys"


def _dotted(raw: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in raw.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")


def _explain(error: Exception, origin: Any, raw: Mapping[Any, Any] | None = None) -> ConfigError:
    name = getattr(error, "full_key", None) or (", ".join(map(str, raw)) if raw else "a value")
    return ConfigError(f"{origin}: {name}: {first_line(error)}")
