"""YAML file + ``key=value`` → a checked :class:`Config`, or a :class:`ConfigError` that names the key; and back."""

from __future__ import annotations

import dataclasses
import datetime
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_speedups.core.command_line import COMMAND_LINE
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.files import with_working_directory, write_atomically
from composer_speedups.core.settings import Origins, Settings, fields_of, leaf_types, section_of
from composer_speedups.train.config.schema import Config

__all__ = [
    "as_yaml",
    "load_config",
    "load_with_origins",
    "save_config",
    "written",
]

_MAX_BYTES = 2**20  # size limit of a config file; this package's have about two thousand bytes
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Keys = tuple[str | int, ...]  # path of keys to a value


def load_config(file: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of :func:`load_with_origins`."""
    return load_with_origins(file, overrides)[0]


def load_with_origins(
    file: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> tuple[Config, Origins]:
    """Read, merge and check a config.

    Args:
        file: YAML file; None starts from the defaults.
        overrides: ``key=value`` strings with values in YAML; the last one of a key wins. ``algorithms.NAME=null``
            removes a technique.

    Returns:
        The config, and the file or command line that set each key.

    Raises:
        ConfigError: Names the key, the closest known key, and the file.
    """
    merged = dataclasses.asdict(Config())
    origin_of = Origins(COMMAND_LINE if file is None else str(file))
    if file is not None:
        merged = _merge(merged, _read_yaml(file), str(file), origin_of)
    for override in overrides:
        merged = _merge(merged, _read_override(override), COMMAND_LINE, origin_of)
    try:
        values: Any = OmegaConf.to_container(OmegaConf.create(merged), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "a value")
        raise ConfigError(f"{origin_of[key]}: {key}: {first_line(error)}") from error
    config = Config.read(values, origins=origin_of)
    if config.model.size is not None and origin_of["model.name"] == COMMAND_LINE != origin_of["model.size"]:
        raise ConfigError(
            f"{COMMAND_LINE}: model.name has no effect on the model with random weights that model.size asks for in "
            f"{origin_of['model.size']}; add model.init=pretrained model.size=null"
        )
    resolved = dataclasses.asdict(config)
    references = ((path, text) for path, text in _leaves(merged) if isinstance(text, str) and "${" in text)
    config.interpolations = {path: (text, _at(resolved, path)) for path, text in references}
    return config, origin_of


def save_config(config: Config, path: Path, *, resolved: bool = False) -> None:
    """Write a config that ``-f`` can read.

    Args:
        config: From :func:`load_config`.
        path: The YAML file.
        resolved: Write the values that a run uses, for a file that only child processes read, instead of the result of
            :func:`written`.
    """
    write_atomically(path, as_yaml(config, resolved=resolved))


def as_yaml(config: Config, *, resolved: bool = False) -> str:
    """The text that :func:`save_config` writes."""
    content = dataclasses.asdict(config) if resolved else written(config)
    return OmegaConf.to_yaml(OmegaConf.create(content))


def written(config: Config) -> dict[str, Any]:
    """The config as it is written to config.yaml, report.json and loggers.

    A value that was set as ``${oc.env:NAME}`` is written in that form, because the environment may contain secrets.
    """
    values = dataclasses.asdict(config)
    for path, (text, value) in config.interpolations.items():
        if _at(values, path) == value:  # otherwise it was changed after loading
            _at(values, path[:-1])[path[-1]] = text
    return values


def _read_yaml(file: str | os.PathLike[str]) -> dict[Any, Any]:
    text = _read_text(file)
    try:
        loaded, node = OmegaConf.load(io.StringIO(text)), yaml.compose(text, _LOADER)
        empty = not loaded and not isinstance(node, yaml.CollectionNode)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if empty:  # OmegaConf reads it as {}, which would train the default model on the default dataset
        raise ConfigError(f"{file}: the file is empty or contains only comments; start from yamls/quickstart.yaml")
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{file}: must contain keys and values at the top level, not a {type(loaded).__name__}")
    return _with_text(loaded, node)


def _read_override(override: str) -> dict[Any, Any]:
    name, _, value = override.partition("=")
    if not all(name.split(".")):
        raise ConfigError(f"{COMMAND_LINE}: {name[:80]!r} is not a key; expected section.key=value")
    try:
        loaded = OmegaConf.from_dotlist([override])
        node = yaml.compose(value, _LOADER)
        for part in reversed(name.split(".")):
            node = yaml.MappingNode("", [(yaml.ScalarNode("", part), node)])
        return _with_text(loaded, node)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{COMMAND_LINE}: the value of {name} is not valid YAML: {error}") from error


def _with_text(loaded: Any, node: Any) -> dict[Any, Any]:
    """The parsed keys and values. Where the config expects text, it is as written, not what YAML reads as a boolean,
    number or date (``no``, ``007``). ``node`` is the same mapping as a YAML node."""
    raw = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(raw, dict)
    _keep_text(raw, node, Config)
    return raw


def _keep_text(raw: dict[Any, Any], node: Any, cls: type[Settings]) -> None:
    fields = fields_of(cls)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = key.value
        if not isinstance(name, str) or name not in fields or name not in raw:
            continue
        held, section = raw[name], section_of(fields[name])
        if section is not None and isinstance(held, dict):
            _keep_text(held, value, section)
        elif isinstance(held, dict):
            raw[name] = _keys_as_written(held, value)
        elif str in leaf_types(fields[name].annotation):
            listed = isinstance(held, list) and isinstance(value, yaml.SequenceNode)
            pairs = zip(held, value.value, strict=True) if listed else ()
            raw[name] = [_as_written(*pair) for pair in pairs] if listed else _as_written(held, value)


def _keys_as_written(held: dict[Any, Any], node: Any) -> dict[Any, Any]:
    """A mapping with its keys as text, such as the class names ``no`` and ``1``; unchanged if it merges another."""
    names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    if len(names) != len(held) or "<<" in names or not all(isinstance(name, str) for name in names):
        return held
    return dict(zip(names, held.values(), strict=True))


def _as_written(value: Any, node: Any) -> Any:
    typed = isinstance(value, (bool, int, float, datetime.date))
    return node.value if typed and isinstance(node, yaml.ScalarNode) else value


def _merge(base: dict[Any, Any], raw: dict[Any, Any], origin: str, origin_of: Origins) -> dict[Any, Any]:
    if problem := _problem_in(raw):
        raise ConfigError(f"{origin}: {problem}")
    if "algorithms" in raw:
        raw["algorithms"] = _algorithms_as_mapping(raw["algorithms"], origin, "algorithms")
        if not raw["algorithms"]:
            base = {**base, "algorithms": {}}
    if isinstance(baseline := raw.get("baseline"), dict) and "algorithms" in baseline:
        baseline["algorithms"] = _algorithms_as_mapping(baseline["algorithms"], origin, "baseline.algorithms")
    origin_of.update(dict.fromkeys(_dotted(raw), origin))
    return _merged(base, raw)


def _merged(base: dict[Any, Any], raw: dict[Any, Any]) -> dict[Any, Any]:
    """Values of ``raw`` replace those of ``base``; mappings are merged."""
    return base | {
        name: _merged(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        for name, value in raw.items()
    }


def _algorithms_as_mapping(value: Any, origin: str, key: str) -> dict[Any, Any]:
    """``[a, {b: {x: 1}}]`` and ``{a: {}, b: {x: 1}}`` are equivalent."""
    items: list[tuple[Any, Any]] = []
    for entry in value if isinstance(value, list) else [{} if value is None else value]:
        if isinstance(entry, Mapping):
            items += entry.items()
        elif isinstance(entry, str) and isinstance(value, list):
            items.append((entry, {}))
        else:
            raise ConfigError(f"{origin}: {key} must contain technique names, not {entry!r}")
    names = [name for name, _ in items]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{origin}: {key} lists {twice[0]!r} twice; list it once")
    return dict(items)


def _dotted(raw: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in raw.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")


def _read_text(file: str | os.PathLike[str]) -> str:
    """The file's text: at most 1 MiB in UTF-8, or in UTF-16 with a byte order mark."""
    try:
        with open(file, "rb") as stream:
            data = stream.read(_MAX_BYTES + 1)  # a device may be endless
    except FileNotFoundError:
        shown = with_working_directory(file)
        raise ConfigError(f"{shown}: no such file; -f takes a YAML file, such as yamls/quickstart.yaml") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)[:80]}: cannot be read: {error}; -f takes a YAML file") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{file}: is not a config: it has more than {_MAX_BYTES} bytes")
    try:
        return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read: {error}; save it as UTF-8") from error


def _problem_in(raw: Mapping[Any, Any]) -> str | None:
    """Describe a value that nothing can use; None if there is none.

    These are text with a NUL or an unpaired surrogate, which cannot be part of a path, NaN, infinity, and integers of
    more than 64 bits.
    """
    for path, value in _leaves(raw):
        key = ascii(".".join(map(str, path)))[1:-1]
        for text in (*path, value):
            odd = [c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"] if isinstance(text, str) else ()
            if odd:
                return f"{key} must be plain text, and contains the character {odd[0]!a}"
        if isinstance(value, int) and value.bit_length() > 63:
            return f"{key} must be less than 2**63, and has {value.bit_length()} bits"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key} must be a finite number, not {value}"
    return None


def _leaves(values: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if isinstance(values, (dict, list)):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _leaves(value, (*path, key))
    else:
        yield path, values


def _at(values: Any, path: Keys) -> Any:
    """The value at a path of keys; None if there is none."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values
