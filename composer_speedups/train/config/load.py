"""YAML file + ``key=value`` → a checked :class:`Config`, or a :class:`ConfigError` with all mistakes; and back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_speedups.core.command_line import COMMAND_LINE, read_pair, read_yaml
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.files import with_working_directory, write_atomically
from composer_speedups.core.settings import Origins
from composer_speedups.tasks.settings import TASKS, ClassificationSettings
from composer_speedups.train.config.schema import Config, as_mapping

_MAX_BYTES = 2**20  # size limit of a config file; this package's have about two thousand bytes

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
        ConfigError: One line for each mistake: the file or command line, the key, and what is wrong.
    """
    given: dict[Any, Any] = {}
    origins, mistakes = Origins(COMMAND_LINE if file is None else str(file)), list[str]()
    if file is not None:
        given = _merged(given, _read_file(file), str(file), origins)
    for override in overrides:
        try:
            given = _merged(given, read_pair(override, Config), COMMAND_LINE, origins)
        except ConfigError as error:
            mistakes += error.lines
    try:
        merged = _with_defaults(given)
        values: Any = OmegaConf.to_container(OmegaConf.create(merged), resolve=True, throw_on_missing=True)
        config = Config.read(values, origins=origins)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "a value")
        raise ConfigError.of([*mistakes, f"{origins[key]}: {key}: {first_line(error)}"]) from error
    except ConfigError as error:
        raise ConfigError.of([*mistakes, *error.lines]) from None
    if config.model.size is not None and origins["model.name"] == COMMAND_LINE != origins["model.size"]:
        mistakes.append(
            f"{COMMAND_LINE}: model.name has no effect on the model with random weights that model.size asks for in "
            f"{origins['model.size']}; add model.init=pretrained model.size=null"
        )
    if mistakes:
        raise ConfigError.of(mistakes)
    resolved = config.model_dump()
    references = ((path, text) for path, text in _leaves(merged) if isinstance(text, str) and "${" in text)
    vars(config)["interpolations"] = {path: (text, _at(resolved, path)) for path, text in references}
    return config, origins


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
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump() if resolved else written(config)))


def written(config: Config) -> dict[str, Any]:
    """The config as it is written to config.yaml, report.json and loggers.

    A value that was set as ``${oc.env:NAME}`` is written in that form, because the environment may contain secrets.
    """
    values = config.model_dump()
    for path, (text, value) in config.interpolations.items():
        if _at(values, path) == value:  # otherwise it was changed after loading
            _at(values, path[:-1])[path[-1]] = text
    return values


def _read_file(file: str | os.PathLike[str]) -> dict[Any, Any]:
    try:
        loaded = read_yaml(_read_text(file), Config)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{file}: not valid YAML: {error}") from error
    if loaded is None:  # {} would train the default model on the default dataset
        raise ConfigError(f"{file}: the file is empty or contains only comments; start from yamls/quickstart.yaml")
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file}: must contain keys and values at the top level, not a {type(loaded).__name__}")
    return loaded


def _with_defaults(given: dict[Any, Any]) -> dict[Any, Any]:
    """The values over the defaults, to which interpolations may refer."""
    model = given.get("model")
    task = model.get("task") if isinstance(model, dict) else None
    chosen: Any = TASKS.get(task if isinstance(task, str) else "", ClassificationSettings)()
    return _over(Config(task=chosen).model_dump(), given)


def _over(base: dict[Any, Any], given: dict[Any, Any]) -> dict[Any, Any]:
    """Values of ``given`` replace those of ``base``; mappings are merged."""
    return base | {
        name: _over(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        for name, value in given.items()
    }


def _merged(base: dict[Any, Any], given: dict[Any, Any], origin: str, origins: Origins) -> dict[Any, Any]:
    for section, prefix in ((given, ""), (given.get("baseline"), "baseline.")):
        if isinstance(section, dict) and "algorithms" in section:
            try:
                section["algorithms"] = as_mapping(section["algorithms"])
            except ValueError as error:
                raise ConfigError(f"{origin}: {prefix}algorithms {error}") from None
    if "algorithms" in given and not given["algorithms"]:
        base = {**base, "algorithms": {}}
    origins.update(dict.fromkeys(_dotted(given), origin))
    return _over(base, given)


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
