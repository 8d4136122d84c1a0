"""Parse command lines: ``-f FILE`` or positional words, and ``key=value`` pairs for a class of settings."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.core.settings import Settings, fields_of, keys_of, parts_of, sections_of

COMMAND_LINE = "command line"
_PACKAGE = Path(__file__).parents[1]
# in the installed wheel, or next to the package in a checkout
_SHIPPED = _PACKAGE / "yamls" if (_PACKAGE / "yamls").is_dir() else _PACKAGE.parent / "yamls"
T = TypeVar("T", bound=Settings)


class CommandLine(NamedTuple):
    files: list[str]  # none for programs with positional words
    words: list[str]
    overrides: list[str]  # key=value

    @property
    def file(self) -> str:
        [file] = self.files
        return file


def console_command() -> str | None:
    """The name of the console command of this package that started the process; None if none did."""
    command = Path(sys.argv[0]).name
    return command if command.startswith("composer-speedups") else None


def parse_command_line(
    arguments: Sequence[str], *words: str, several_files: bool = False, more: str = "", help: Callable[[], str] = str
) -> CommandLine:
    """Split a command line into ``key=value`` pairs, and either positional ``words``, such as ``PROJECT``, or
    ``-f FILE``; with ``several_files``, also more than one, and ``-f FOLDER/all`` for a folder of the package.
    ``--help`` prints ``help()`` and exits with 0."""
    names, positional, overrides = list[str](), list[str](), list[str]()
    usage = " ".join([*words, more]).strip() or "-f FILE"
    rest = iter(arguments)
    for argument in rest:
        if argument in ("-h", "--help"):
            print(help())
            raise SystemExit(0)
        if argument in ("-f", "--file") and not words:
            names.append(next(rest, ""))
        elif "=" in argument[1:] and argument[0] not in "-=":
            overrides.append(argument)
        elif words and argument and "=" not in argument and argument[0] != "-":
            positional.append(argument)
        else:
            raise ConfigError(f"{COMMAND_LINE}: cannot read {argument!r}; expected {usage} or key=value")
    if len(positional) != len(words):
        raise ConfigError(
            f"{COMMAND_LINE}: expected {usage} and then key=value, not {' '.join(arguments)!r}; see --help"
        )
    if not words and not all(names or [""]):
        raise ConfigError(f"{COMMAND_LINE}: no config file; add -f quickstart, or --help for all keys")
    if len(names) > 1 and not several_files:
        raise ConfigError(f"{COMMAND_LINE}: -f names a second config file; pass one")
    folders = {name: _configs_of_folder(name) for name in names if several_files}
    return CommandLine([path for n in names for path in folders.get(n) or [find_config(n)]], positional, overrides)


def find_config(name: str) -> str:
    """The path of the config that ``-f`` names: a file, or one of the package's, such as ``quickstart``."""
    if os.path.isfile(name):
        return name
    shipped = _shipped_configs()
    if name not in shipped:
        if os.path.basename(name) != name or os.path.splitext(name)[1]:
            return name  # reading the file will report the error
        hint = f"{did_you_mean(name, shipped, otherwise=';')} known: {', '.join(shipped)}"
        raise ConfigError(f"-f {name[:80]}: no such file, and no config of the package has that name{hint}")
    return shipped[name]


def _configs_of_folder(name: str) -> list[str]:
    """The paths of the package's configs that ``FOLDER/all`` names; empty for another name."""
    folder, _, last = name.rpartition("/")
    shipped = _shipped_configs() if folder and last == "all" and not os.path.isfile(name) else {}
    return [path for config, path in shipped.items() if config.rpartition("/")[0] == folder]


def _shipped_configs() -> dict[str, str]:
    paths = {path.relative_to(_SHIPPED).with_suffix("").as_posix(): str(path) for path in _SHIPPED.rglob("*.yaml")}
    return dict(sorted(paths.items()))


def read_settings(cls: type[T], arguments: Sequence[str], prefix: str = "") -> tuple[T, list[str]]:
    """Read settings of a class without sections from the ``key=value`` pairs with the prefix, and return them with the
    other arguments. The last one of a key wins; ``a,b`` is a list, too, and text is taken as it is."""
    own = [pair for pair in arguments if "=" in pair and pair.startswith(prefix)]
    values: dict[str, Any] = {}
    for pair in own:
        key, _, text = pair.removeprefix(prefix).partition("=")
        kinds = parts_of(fields_of(cls)[key].annotation) if key in fields_of(cls) else set()
        if kinds <= {str, types.NoneType} and kinds:
            values[key] = None if text == "null" and types.NoneType in kinds else text
            continue
        values |= read_pair(f"{key}={text}", cls, prefix)
        if list in kinds and not isinstance(values[key], list):
            values[key] = None if text == "null" else [item.strip() for item in text.split(",") if item.strip()]
    return cls.read(values, prefix, defaultdict(lambda: COMMAND_LINE)), [pair for pair in arguments if pair not in own]


# YAML and key=value

_TEXT = "tag:yaml.org,2002:str"
_TYPED = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}


class _Loader(yaml.SafeLoader):
    """Reads ``1e-3`` as a number, for which YAML 1.1 asks for ``1.0e-3``."""


_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def read_pair(pair: str, cls: type[Settings], prefix: str = "") -> dict[Any, Any]:
    """The nested mapping of a ``section.key=value``; text is kept as in :func:`read_yaml`."""
    name, _, value = pair.partition("=")
    if not all(name.split(".")) or name.count(".") > 99:
        raise ConfigError(f"{COMMAND_LINE}: {name[:80]!r} is not a key; expected section.key=value")
    try:
        held = read_yaml(value, cls, name)
    except ValueError as error:
        raise ConfigError(f"{COMMAND_LINE}: the value of {prefix}{name} is not valid YAML: {error}") from error
    for part in reversed(name.split(".")):
        held = {part: held}
    return held  # type: ignore[no-any-return]


def read_yaml(text: str, cls: type[Settings], key: str = "") -> Any:
    """The value of a YAML text at a key, None if it is empty. Where ``cls`` expects text, or a mapping from names, it
    is as written, not what YAML reads as a boolean, number or date (``no``, ``007``)."""
    kinds: dict[str, set[Any]] = {}
    for name, field, _ in keys_of(cls):
        kinds[name] = kinds.get(name, set()) | (parts_of(field.annotation) if not sections_of(field) else set())
    try:
        loader = _Loader(text)  # refuses NUL
        node = loader.get_single_node()
        if node is None:
            return None
        _keep_text(node, key, kinds)
        value = loader.construct_document(node)
        json.dumps(value, default=str, skipkeys=True)  # refuses a value that contains itself
        return value
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from error


def list_items(text: str) -> list[str] | None:
    """The items of a YAML list, each as it is written; None for another text."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.YAMLError:
        return None
    items = node.value if isinstance(node, yaml.SequenceNode) else None
    return None if items is None else [text[item.start_mark.index : item.end_mark.index] for item in items]


def _keep_text(node: yaml.Node, key: str, kinds: Mapping[str, set[Any]]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen = set[str]()
        for name, value in node.value:
            if str(name.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {name.value}", name.start_mark)
            seen.add(str(name.value))
            if dict not in kinds.get(key, ()):
                _keep_text(value, key if name.value == "<<" else f"{key}.{name.value}".removeprefix("."), kinds)
            elif name.tag in _TYPED:
                name.tag = _TEXT
    elif str in kinds.get(key, ()):
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            item.tag = _TEXT if item.tag in _TYPED else item.tag
