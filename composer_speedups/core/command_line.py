"""Parse command lines: ``-f FILE`` or positional words, and ``key=value`` pairs for a typed dataclass with bounds."""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.core.settings import Spelling, check_value, field_docs, field_line

__all__ = ["COMMAND_LINE", "CommandLine", "find_config", "keys_help", "parse_command_line", "read_settings"]

COMMAND_LINE = "command line"
_PACKAGE = Path(__file__).parents[1]
# in the installed wheel, or next to the package in a checkout
_SHIPPED = _PACKAGE / "yamls" if (_PACKAGE / "yamls").is_dir() else _PACKAGE.parent / "yamls"
_IN_ERRORS = Spelling(
    lambda options: " or ".join(map(str, options)),
    "a comma-separated list, each item {}",
    ", or ",
    {int: "a whole number", float: "a number", bool: "true or false", str: "non-empty text"},
)
T = TypeVar("T")


class CommandLine(NamedTuple):
    file: str  # empty for programs with positional words, and with --help
    words: list[str]
    overrides: list[str]  # key=value
    help: bool


def parse_command_line(arguments: Sequence[str], *words: str) -> CommandLine:
    """Split a command line into ``--help``, ``key=value`` pairs, and ``-f FILE`` or positional words.

    Args:
        arguments: The arguments without the program's name.
        words: Names of the positional words that the program takes instead of ``-f FILE``, such as ``PROJECT``.

    Raises:
        ConfigError: An argument of another form, a missing or superfluous file or word, or an unknown config name.
    """
    file, found, overrides, wants_help = "", [], [], False
    rest = iter(arguments)
    for argument in rest:
        if argument in ("-h", "--help"):
            wants_help = True
        elif argument in ("-f", "--file") and not words:
            if file:
                raise ConfigError(f"{COMMAND_LINE}: {argument} names a second config file; pass one")
            file = next(rest, "")
            if not file:
                raise ConfigError(f"{COMMAND_LINE}: {argument} needs a file, as in -f yamls/quickstart.yaml")
        elif "=" in argument.lstrip("=") and not argument.startswith("-"):
            overrides.append(argument)
        elif words and argument and "=" not in argument and not argument.startswith("-"):
            found.append(argument)
        elif argument.startswith("--") and "=" in argument:
            raise ConfigError(f"{COMMAND_LINE}: cannot read {argument!r}; did you mean {argument[2:]!r}?")
        else:
            expected = " ".join(words) or "-f FILE"
            raise ConfigError(f"{COMMAND_LINE}: cannot read {argument!r}; expected {expected} or key=value")
    if not wants_help and len(found) != len(words):
        expected, received = " ".join(words), " ".join(arguments)
        raise ConfigError(f"{COMMAND_LINE}: expected {expected} and then key=value, not {received!r}; see --help")
    if not wants_help and not words and not file:
        raise ConfigError(f"{COMMAND_LINE}: no config file; add -f quickstart, or --help for all keys")
    path = file if wants_help or not file else find_config(file)
    return CommandLine(path, found, overrides, wants_help)


def find_config(name: str) -> str:
    """The path of the config that ``-f`` names: a file, or a config that comes with the package, such as ``quickstart``
    or ``glue/mrpc``.

    Raises:
        ConfigError: A name without folder and suffix that is neither a file nor a config of the package.
    """
    if os.path.isfile(name):
        return name
    found = {path.relative_to(_SHIPPED).with_suffix("").as_posix(): path for path in _SHIPPED.rglob("*.yaml")}
    shipped = dict(sorted(found.items()))
    if name not in shipped:
        if os.path.basename(name) != name or os.path.splitext(name)[1]:
            return name  # reading the file will report the error
        hint = did_you_mean(name, shipped)
        known = "" if hint.startswith("; known") else f" known: {', '.join(shipped)}"
        raise ConfigError(f"-f {name[:80]}: no such file, and no config of the package has that name{hint}{known}")
    return str(shipped[name])


def read_settings(cls: type[T], arguments: Sequence[str], prefix: str = "") -> tuple[T, list[str]]:
    """Fill a dataclass from ``key=value`` pairs. The last value of a key wins.

    Values are plain text, lists are written ``a,b`` or ``[a,b]``, and ``null`` means None.

    Args:
        cls: Its fields have type str, int, float, bool or Literal, a list of one of these, or None. Their bounds are
            those of :func:`.key`.
        arguments: ``key=value`` strings. With a prefix, arguments without it are returned.
        prefix: Prefix of the keys, such as ``tune.``.

    Returns:
        The dataclass, and the arguments without the prefix.

    Raises:
        ConfigError: Names the key and, if there is one, the closest known key.
    """
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        dotted, equals, text = argument.partition("=")
        if prefix and not (equals and f"{dotted}.".startswith(prefix)):
            rest.append(argument)
            continue
        name = dotted.removeprefix(prefix)
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)  # shortens long names
            hint = f"; did you mean {prefix + close[0]!r}?" if close else f"; known: {', '.join(fields)}"
            raise ConfigError(f"{COMMAND_LINE}: unknown key {dotted!r}{hint}")
        try:
            values[name] = _value(hints[name], text)
        except (KeyError, ValueError):
            raise ConfigError(f"{COMMAND_LINE}: {dotted} must be {_IN_ERRORS.of(hints[name])}, not {text!r}") from None
        if problem := check_value(fields[name], values[name]):
            raise ConfigError(f"{COMMAND_LINE}: {dotted} {problem}")
    return cls(**values), rest


def keys_help(cls: type, prefix: str = "") -> str:
    """Every key with its type, default, bounds and doc line, for ``--help``."""
    docs, hints = field_docs(cls), typing.get_type_hints(cls)
    lines = (
        f"  {field_line(prefix + f.name, f, hints[f.name])}\n      {docs[f.name]}" for f in dataclasses.fields(cls)
    )
    return "\n".join(lines)


def _value(hint: Any, text: str) -> Any:
    if isinstance(hint, types.UnionType):
        return None if text == "null" else _value(typing.get_args(hint)[0], text)
    if typing.get_origin(hint) is list:
        items = text.removeprefix("[").removesuffix("]")
        return [_value(typing.get_args(hint)[0], item.strip()) for item in items.split(",") if items]
    if typing.get_origin(hint) is typing.Literal:
        return {str(option): option for option in typing.get_args(hint)}[text]
    if hint is bool:
        return {"true": True, "false": False}[text]
    if hint is str and not text.strip():
        raise ValueError
    return hint(text)
