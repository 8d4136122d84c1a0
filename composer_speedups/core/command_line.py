"""Parse command lines: ``-f FILE`` or positional words, and ``key=value`` pairs for a class of settings."""

from __future__ import annotations

import os
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic.fields import FieldInfo

from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.core.settings import Origins, Settings, fields_of

__all__ = [
    "COMMAND_LINE",
    "CommandLine",
    "console_command",
    "find_config",
    "parse_command_line",
    "read_settings",
    "usage_as_typed",
]

COMMAND_LINE = "command line"
_PACKAGE = Path(__file__).parents[1]
# in the installed wheel, or next to the package in a checkout
_SHIPPED = _PACKAGE / "yamls" if (_PACKAGE / "yamls").is_dir() else _PACKAGE.parent / "yamls"
T = TypeVar("T", bound=Settings)


class CommandLine(NamedTuple):
    files: list[str]  # empty for programs with positional words, and with --help
    words: list[str]
    overrides: list[str]  # key=value
    help: bool

    @property
    def file(self) -> str:
        """The only file, of a program that takes one."""
        [file] = self.files
        return file


def console_command() -> str | None:
    """The name of the console command of this package that started the process; None if none did."""
    command = Path(sys.argv[0]).name
    return command if command.startswith("composer-speedups") else None


def usage_as_typed(usage: str) -> str:
    """A program's usage, with its console command in place of ``python -m …`` or ``composer train.py`` if that is what
    started it."""
    command = console_command()
    if command is None:
        return usage
    module = f"python -m composer_speedups.{command.removeprefix('composer-speedups-')} "
    return usage.replace(module, f"{command} ").replace("usage: composer train.py ", f"usage: {command} ")


def parse_command_line(
    arguments: Sequence[str], *words: str, several_files: bool = False, more: str = ""
) -> CommandLine:
    """Split a command line into ``--help``, ``key=value`` pairs, and ``-f FILE`` or positional words.

    Args:
        arguments: The arguments without the program's name.
        words: Names of the positional words that the program takes instead of ``-f FILE``, such as ``PROJECT``.
        several_files: Take more than one ``-f FILE``, and ``-f FOLDER/all`` for all configs of a folder of the package.
        more: Options that follow the words, for errors.

    Raises:
        ConfigError: An argument of another form, a missing or superfluous file or word, or an unknown config name.
    """
    names, positional, overrides, wants_help = list[str](), [], [], False
    usage = " ".join([*words, more]).strip()
    rest = iter(arguments)
    for argument in rest:
        if argument in ("-h", "--help"):
            wants_help = True
        elif argument in ("-f", "--file") and not words:
            if names and not several_files:
                raise ConfigError(f"{COMMAND_LINE}: {argument} names a second config file; pass one")
            names.append(next(rest, ""))
            if not names[-1]:
                raise ConfigError(f"{COMMAND_LINE}: {argument} needs a file, as in -f yamls/quickstart.yaml")
        elif "=" in argument.lstrip("=") and not argument.startswith("-"):
            overrides.append(argument)
        elif words and argument and "=" not in argument and not argument.startswith("-"):
            positional.append(argument)
        elif argument.startswith("--") and "=" in argument:
            raise ConfigError(f"{COMMAND_LINE}: cannot read {argument!r}; did you mean {argument[2:]!r}?")
        else:
            expected = usage or "-f FILE"
            hint = "; quote a value that has blanks, as in 'key={name: value}'" if argument[-1:] in ("}", "]") else ""
            raise ConfigError(f"{COMMAND_LINE}: cannot read {argument!r}; expected {expected} or key=value{hint}")
    if not wants_help and len(positional) != len(words):
        raise ConfigError(
            f"{COMMAND_LINE}: expected {usage} and then key=value, not {' '.join(arguments)!r}; see --help"
        )
    if not wants_help and not words and not names:
        raise ConfigError(f"{COMMAND_LINE}: no config file; add -f quickstart, or --help for all keys")
    folders = {name: _configs_of_folder(name) for name in names if several_files}
    files = [path for name in names if not wants_help for path in folders.get(name) or [find_config(name)]]
    return CommandLine(files, positional, overrides, wants_help)


def find_config(name: str) -> str:
    """The path of the config that ``-f`` names: a file, or a config that comes with the package, such as ``quickstart``
    or ``glue/mrpc``.

    Raises:
        ConfigError: A name without folder and suffix that is neither a file nor a config of the package.
    """
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
    """Name → path of the configs that come with the package."""
    paths = {path.relative_to(_SHIPPED).with_suffix("").as_posix(): str(path) for path in _SHIPPED.rglob("*.yaml")}
    return dict(sorted(paths.items()))


def read_settings(cls: type[T], arguments: Sequence[str], prefix: str = "") -> tuple[T, list[str]]:
    """Read settings from ``key=value`` pairs of plain text; the last value of a key wins.

    Lists are written ``a,b`` or ``[a,b]``, and ``null`` means None.

    Args:
        cls: A class without sections.
        arguments: ``key=value`` strings. With a prefix, arguments without it are returned.
        prefix: Prefix of the keys, such as ``tune.``.

    Returns:
        The settings, and the arguments without the prefix.

    Raises:
        ConfigError: Names the key and, if there is one, the closest known key.
    """
    values: dict[str, Any] = {}
    others = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.startswith(prefix):
            others.append(argument)
            continue
        name = key.removeprefix(prefix)
        values[name] = value = _parse(text, fields_of(cls).get(name))
        if "" in (value if isinstance(value, list) else [text.strip()]):
            raise ConfigError(f"{COMMAND_LINE}: {key} must not be empty")
    return cls.read(values, prefix, Origins(COMMAND_LINE)), others


def _parse(text: str, field: FieldInfo | None) -> Any:
    """None or a list of texts, if the field takes it, or the text itself, which :meth:`Settings.read` converts."""
    hints = (field.annotation, *typing.get_args(field.annotation)) if field is not None else ()
    if text == "null" and types.NoneType in hints:
        return None
    if any(typing.get_origin(hint) is list for hint in hints):
        items = text.removeprefix("[").removesuffix("]")
        return [item.strip() for item in items.split(",") if items]
    return text
