"""YAML file + ``key=value`` → a checked :class:`Config`, or a :class:`ConfigError` with all mistakes; and back."""

from __future__ import annotations

import functools
import operator
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_speedups.core.command_line import COMMAND_LINE, read_pair, read_yaml
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.files import with_working_directory, write_atomically
from composer_speedups.tasks.settings import TASKS, ClassificationSettings
from composer_speedups.train.config.schema import Config, as_mapping

Keys = tuple[str, ...]  # path of keys to a value


def load_config(file: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read, merge and check a config."""
    given: dict[Any, Any] = {}
    otherwise, mistakes = COMMAND_LINE if file is None else str(file), list[str]()
    origins = defaultdict[str, str](lambda: otherwise)  # dotted key → the file or command line that set it
    if file is not None:
        given = _merged(given, _read_file(file), str(file), origins)
    for override in overrides:
        try:
            given = _merged(given, read_pair(override, Config), COMMAND_LINE, origins)
        except ConfigError as error:
            mistakes += error.lines
    try:
        task = dict(_flat(given)).get(("model", "task"))
        chosen: Any = TASKS.get(task if isinstance(task, str) else "", ClassificationSettings)()
        merged = _over(Config(task=chosen).model_dump(), given)  # to which interpolations may refer
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
    resolved, references = dict(_all(config.model_dump())), ((k, v) for k, v in _flat(merged) if "${" in str(v))
    vars(config)["interpolations"] = {path: (text, resolved.get(path)) for path, text in references}
    return config


def save_config(config: Config, path: Path, *, resolved: bool = False) -> None:
    write_atomically(path, as_yaml(config, resolved=resolved))


def as_yaml(config: Config, *, resolved: bool = False) -> str:
    """A config that ``-f`` can read, with references to the environment unless ``resolved``."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump() if resolved else written(config)))


def written(config: Config) -> dict[str, Any]:
    """The config as it is written to files and loggers: with ``${oc.env:NAME}`` in place of secrets."""
    values = config.model_dump()
    now = dict(_all(values))
    for path, (text, value) in config.interpolations.items():
        if path in now and now[path] == value:  # otherwise it was changed after loading
            functools.reduce(operator.getitem, path[:-1], values)[path[-1]] = text
    return values


# Keys that may differ between a run and its resumption, because they affect neither the weights nor the values that
# reports compare. The name of a section covers all its keys.
_IGNORED_KEYS = (
    "runs_folder export plot baseline callbacks loggers "
    "trainer.progress_bar trainer.on_out_of_memory trainer.dist_timeout "
    "data.pin_memory data.prefetch_factor data.report data.cache_dir "
    "checkpoint.interval checkpoint.keep checkpoint.autoresume checkpoint.trust_checkpoint"
).split()


def differences(config: Config, stored: Path) -> list[tuple[str, Any, Any]] | None:
    """The keys whose values differ from a run's config.yaml, with both values; None if the file cannot be read."""
    try:
        before = dict(_flat(yaml.safe_load(stored.read_text())))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        return None
    now, defaults = dict(_flat(written(config))), dict(_flat(Config(task=type(config.task)()).model_dump()))
    # a key that the stored file lacks, since the version that wrote it did not have it, had its default
    paths = before.keys() | now.keys()
    both = [[path, *(values.get(path, defaults.get(path, "unset")) for values in (before, now))] for path in paths]
    named = [(".".join(map(str, path)), *values) for path, *values in both]
    return [
        (name, old, new)
        for name, old, new in sorted(named, key=operator.itemgetter(0))
        if old != new and not any(f"{name}.".startswith(f"{key}.") for key in _IGNORED_KEYS)
    ]


def _all(section: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield each value and section with its path of keys; a reference may set a whole section."""
    for name, value in section.items():
        yield (*path, name), value
        if isinstance(value, dict):
            yield from _all(value, (*path, name))


def _flat(section: Any) -> Iterator[tuple[Keys, Any]]:
    """As :func:`_all`, without nonempty sections."""
    return ((path, value) for path, value in _all(section) if not (isinstance(value, dict) and value))


def _read_file(file: str | os.PathLike[str]) -> dict[Any, Any]:
    try:
        loaded = read_yaml(Path(file).read_text("utf-8-sig"), Config)
    except FileNotFoundError:
        shown = with_working_directory(file)
        raise ConfigError(f"{shown}: no such file; -f takes a YAML file, such as yamls/quickstart.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)[:80]}: cannot be read: {error}; -f takes a YAML file in UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if loaded is None:  # {} would train the default model on the default dataset
        raise ConfigError(f"{file}: the file is empty or contains only comments; start from yamls/quickstart.yaml")
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file}: must contain keys and values at the top level, not a {type(loaded).__name__}")
    return loaded


def _over(base: dict[Any, Any], given: dict[Any, Any]) -> dict[Any, Any]:
    """Values of ``given`` replace those of ``base``; mappings are merged."""
    return base | {
        name: _over(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        for name, value in given.items()
    }


def _merged(base: dict[Any, Any], given: dict[Any, Any], origin: str, origins: dict[str, str]) -> dict[Any, Any]:
    for section, prefix in ((given, ""), (given.get("baseline"), "baseline.")):
        if isinstance(section, dict) and "algorithms" in section:
            try:
                section["algorithms"] = as_mapping(section["algorithms"])
            except ValueError as error:
                raise ConfigError(f"{origin}: {prefix}algorithms {error}") from None
    if "algorithms" in given and not given["algorithms"]:
        base = {**base, "algorithms": {}}
    origins.update((".".join(map(str, path)), origin) for path, _ in _all(given))
    return _over(base, given)
