"""Metadata of config keys: bounds, formats, and the docstring below each field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import operator
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

__all__ = ["LENGTH", "Origins", "Spelling", "annotated", "check_value", "field_docs", "field_line", "key", "key_line"]

LENGTH = ("ep", "ba", "sp", "tok")  # units of Composer's time strings


def key(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    units: tuple[str, ...] = (),
    name: bool = False,
    words: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with bounds.

    Args:
        default, factory: As in :func:`dataclasses.field`.
        ge, gt, le, lt: Bounds of a number; NaN and infinity are always refused.
        units: The value is a Composer time string in one of these units; bounds apply to its number.
        name: The value becomes part of a file name.
        words: Strings allowed in addition to numbers.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {k: v for k, v in bounds.items() if v is not None} | {"units": units, "name": name, "words": words}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def check_value(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Describe why ``value`` is invalid for ``field``, as the end of a sentence; None if it is valid."""
    rules = field.metadata
    if value is None or not rules:
        return None
    if isinstance(value, (list, tuple)):
        return next((problem for item in value if (problem := check_value(field, item))), None)
    if isinstance(value, str):
        return _check_string(rules, value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _check_number(rules, value)
    return None


def _check_number(rules: Any, value: float) -> str | None:
    if not math.isfinite(value):
        return f"must be a finite number, not {value}"
    for rule, text, holds in (
        ("ge", "at least", operator.ge),
        ("gt", "greater than", operator.gt),
        ("le", "at most", operator.le),
        ("lt", "less than", operator.lt),
    ):
        if rule in rules and not holds(value, rules[rule]):
            return f"must be {text} {rules[rule]}, not {value}"
    return None


def _check_string(rules: Any, value: str) -> str | None:
    if rules["units"]:
        found = re.fullmatch(r"(\d+|\d*\.\d+(?=dur))([a-z]+)", value)
        if not found or found[2] not in rules["units"] or (found[2] == "dur" and float(found[1]) > 1):
            units = ", ".join(rules["units"])
            return f"must be a Composer time, a number with one of the units {units}, not {value!r}"
        return _check_number(rules, float(found[1]))
    if rules["name"] and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        return f"must be letters, digits, '.', '_' and '-' (100 at most, no folder), not {value!r}"
    if rules["words"] and value not in rules["words"]:
        return f"must be a number or one of {', '.join(rules['words'])}, not {value!r}"
    return None


class Origins(dict[str, str]):
    """Dotted key → the file or command line that set it; the file for keys that were not set."""

    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.otherwise = otherwise

    def __missing__(self, key: str) -> str:
        return self.otherwise


def annotated(cls: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """Yield the annotated attributes of a class: name, statement, and the string literal below it as one line."""
    for field, doc in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            string = doc.value.value if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) else ""
            yield field.target.id, field, " ".join(str(string).split())


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field of a dataclass, as one line each."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {name: doc for name, _, doc in annotated(body) if doc}


class Spelling(NamedTuple):
    """How types are written, in ``--help`` or in error messages."""

    literal: Callable[[Sequence[Any]], str]  # formats the allowed values
    listed: str  # format of a list, with its item type
    either: str  # separates the types of a union
    names: Mapping[Any, str] = {}  # names of types that differ from Python's

    def of(self, hint: Any) -> str:
        options, origin = typing.get_args(hint), typing.get_origin(hint)
        if origin is typing.Literal:
            return self.literal(options)
        if origin is list:
            return self.listed.format(self.of(options[0]))
        if origin in (types.UnionType, typing.Union):
            return self.either.join(map(self.of, options))
        if hint is types.NoneType:
            return "null"
        return self.names.get(hint) or (str(hint).replace("typing.", "") if options else hint.__name__)


_IN_HELP = Spelling(lambda options: "|".join(map(str, options)), "list[{}]", "|")


def key_line(name: str, hint: str, default: Any, rules: Mapping[str, Any]) -> str:
    """Format a key for ``--help``, as in ``data.batch_size: int = 40  [>= 1]``."""
    shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{signs[k]} {v}" for k, v in rules.items() if k in signs]
    if rules.get("units"):
        bounds.append("units " + ", ".join(rules["units"]))
    return f"{name}: {hint} = {shown}" + (f"  [{'; '.join(bounds)}]" if bounds else "")


def field_line(dotted: str, field: dataclasses.Field[Any], hint: Any) -> str:
    """Format a dataclass field with :func:`key_line`."""
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return key_line(dotted, _IN_HELP.of(hint), default, field.metadata)
