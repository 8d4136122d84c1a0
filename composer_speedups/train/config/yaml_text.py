"""What no key takes, whatever it means: files too large or nested too deep, characters and numbers of no use."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import yaml

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import with_working_directory

__all__ = ["MOST_NESTED", "check_nesting", "fault_in", "read_yaml_text"]

MOST_BYTES = 2**20  # of a config file; ours have two thousand
MOST_NESTED = 50  # levels: libyaml's parser calls itself for each, and a hundred thousand overflow the stack


def read_yaml_text(file: str | os.PathLike[str]) -> str:
    """The file's text, at most 1 MiB of UTF-8 (or of UTF-16 with a byte order mark).

    Raises:
        ConfigError: One line that names the file: it is not there, cannot be read, or is no such text.
        yaml.YAMLError: It is no YAML, or nests more than 50 levels deep.
    """
    try:
        with open(file, "rb") as stream:
            data = stream.read(MOST_BYTES + 1)  # of a device there is no end
    except FileNotFoundError:
        shown = with_working_directory(file)
        raise ConfigError(f"{shown}: no such file; -f takes a YAML file, such as yamls/quickstart.yaml") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)[:80]}: cannot be read: {error}; -f takes a YAML file") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{file}: cannot be a config: it has more than {MOST_BYTES} bytes")
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read: {error}; save it as UTF-8") from error
    check_nesting(text)
    return text


def check_nesting(text: str) -> None:
    """Raises a YAMLError for what nests too deep, without going that deep."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1
        if depth > MOST_NESTED:
            raise yaml.YAMLError(f"it nests more than {MOST_NESTED} levels deep")


def fault_in(value: Any, name: str = "") -> str | None:
    """The dotted key of a value that no key can take, and why, as a sentence without its end; None where there is none.

    That is text with a NUL or half a surrogate pair, which no path holds, a number that is none, or one past 64 bits.
    """
    if isinstance(value, Mapping):
        inside = [(key, f"{name}.{key}" if name else f"{key}") for key in value if isinstance(key, str)]
        return next((f for key, path in inside if (f := fault_in(key, path) or fault_in(value[key], path))), None)
    if isinstance(value, (list, tuple)):
        return next((fault for item in value if (fault := fault_in(item, name))), None)
    if isinstance(value, str):
        odd = next((c for c in value if c == "\0" or "\ud800" <= c <= "\udfff"), None)
        return None if odd is None else f"{ascii(name)[1:-1]} must be plain text, and holds the character {odd!a}"
    if isinstance(value, int) and value.bit_length() > 63:
        return f"{name} must be less than 2**63, and has {value.bit_length()} bits"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} must be a finite number, not {value}"
    return None
