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
from composer_speedups.core.errors import MASK, ConfigError, first_line, mask
from composer_speedups.core.files import with_working_directory, write_atomically
from composer_speedups.core.settings import Origins, Settings, fields_of, leaf_types, section_of
from composer_speedups.train.config.schema import Config

__all__ = [
    "as_yaml",
    "load_config",
    "load_with_origins",
    "parse_plain",
    "save_config",
    "written",
]

_MAX_BYTES = 2**20  # size limit of a config file; this package's have about two thousand bytes
_MAX_DEPTH = 50  # nesting limit: libyaml's parser is recursive, and a hundred thousand levels overflow the stack
_MAX_EXPANDED = 2**21  # characters of a YAML text with its aliases written out, and
_CHARACTERS_PER_VALUE = 20  # for each value: OmegaConf takes 2 KB of memory for it
_MAX_RESOLVED = 2**24  # characters of all values with their interpolations resolved
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
    for path, value in _leaves(values):
        if isinstance(value, str) and MASK in value:
            key = ".".join(map(str, path))
            raise ConfigError(
                f"{origin_of[key]}: {key} holds {MASK}, which runs write in place of a credential; set the value "
                "itself, best as ${oc.env:NAME}"
            )
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


def save_config(config: Config, path: Path, *, credentials: bool = False) -> None:
    """Write a config that ``-f`` can read.

    Args:
        config: From :func:`load_config`.
        path: The YAML file.
        credentials: Write the values that a run uses, for a file that only child processes read. Otherwise the result
            of :func:`written` is saved, and ``-f`` asks for the masked values.
    """
    write_atomically(path, as_yaml(config, credentials=credentials))


def as_yaml(config: Config, *, credentials: bool = False) -> str:
    """The text that :func:`save_config` writes."""
    content = dataclasses.asdict(config) if credentials else written(config)
    return OmegaConf.to_yaml(OmegaConf.create(content))


def written(config: Config) -> dict[str, Any]:
    """The config as it is written to config.yaml, report.json and loggers.

    A value that was set as ``${oc.env:NAME}`` is written in that form, because the environment may contain secrets.
    Other values that look like credentials are masked.
    """
    values = dataclasses.asdict(config)
    for path, (text, value) in config.interpolations.items():
        if _at(values, path) == value:  # otherwise it was changed after loading
            _at(values, path[:-1])[path[-1]] = text
    masked: dict[str, Any] = mask(values)
    return masked


def _read_yaml(file: str | os.PathLike[str]) -> dict[Any, Any]:
    text = _read_text(file)
    try:
        _check_size(text)
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
    if not all(name.split(".")) or name.count(".") >= _MAX_DEPTH:
        raise ConfigError(f"{COMMAND_LINE}: {name[:80]!r} is not a key; expected section.key=value")
    try:
        _check_size(value)
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
    if problem := _problem_in_references([base, raw]):
        raise ConfigError(f"{origin}: {problem}")
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


def parse_plain(text: str) -> Any:
    """Read YAML of plain values, such as the config.yaml of a run, without interpolations.

    Raises:
        yaml.YAMLError: It is not valid, nests too deeply, or its aliases expand to too much.
    """
    _check_size(text)
    return yaml.safe_load(text)


def _check_size(text: str) -> None:
    """Raise a YAMLError if the nesting is too deep or the aliases expand to too much, without recursion."""
    sizes: dict[str | None, int] = {}  # of complete anchors, expanded
    open_nodes: list[list[Any]] = [[None, 0]]  # anchor, expanded size
    for event in yaml.parse(text, Loader=_LOADER):
        size = 0
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            open_nodes.append([event.anchor, _CHARACTERS_PER_VALUE])
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            anchor, size = open_nodes.pop()
            sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = _CHARACTERS_PER_VALUE + len(event.value)
            sizes[event.anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_nodes):
                raise yaml.YAMLError(f"*{event.anchor} contains itself")
            size = sizes.get(event.anchor, 0)  # 0: unknown, which is an error later
        open_nodes[-1][1] += size
        if len(open_nodes) > _MAX_DEPTH + 1:
            raise yaml.YAMLError(f"it nests more than {_MAX_DEPTH} levels deep")
        if open_nodes[-1][1] > _MAX_EXPANDED:
            raise yaml.YAMLError(f"it has too many values, or more than {_MAX_EXPANDED} characters with its aliases")


def _problem_in_references(sections: Sequence[Any]) -> str | None:
    """Describe interpolations that could resolve to too much text; None if there are none.

    A value may refer to values that refer to others, so that few bytes can stand for terabytes. At most, as many
    references as there are multiply the text by 3 ** (references / 3): three at each level.
    """
    texts = [text for section in sections for _, text in _leaves(section) if isinstance(text, str)]
    from_environment = sum(text.count("${oc.env:") for text in texts)
    references = sum(text.count("${") for text in texts) - from_environment
    if not references:
        return None
    size = sum(map(len, texts)) + from_environment * max(map(len, os.environ.values()), default=0)
    if max(size, 4096) * 3 ** (references / 3) <= _MAX_RESOLVED:
        return None
    return (
        f"its values refer to other keys {references} times, as in ${{data.seed}}, which could resolve to more than "
        f"{_MAX_RESOLVED} characters; write some of the values out"
    )


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
