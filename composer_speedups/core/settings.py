"""Settings: each is declared once, with type, default, bounds and doc line, in the body of a class.

Config sections, techniques and callbacks derive from :class:`Settings`. YAML, ``key=value``, ``--help``, constructors,
``repr`` and error messages follow the declarations.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, dataclass_transform

from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, ValidationError, field_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from composer_speedups.core.errors import ConfigError, Refusal, did_you_mean

__all__ = [
    "DURATION_UNITS", "ComposerTime", "FileName", "InvalidSettingError", "Origins", "Settings", "doc_of", "fields_of",
    "help_lines", "key_line", "keys_help", "keys_of", "leaf_types", "refuse_if", "section_of", "time_units",
]  # fmt: skip

DURATION_UNITS = ("ep", "ba", "sp", "tok")  # units of Composer's time strings


class InvalidSettingError(ConfigError):
    """A setting that is valid alone, but not together with others, as ``key`` and the end of a sentence about it."""

    def __init__(self, key: str, problem: str) -> None:
        self.key, self.problem = key, problem
        super().__init__(f"{key} {problem}")


def refuse_if(invalid: object, key: str, problem: str) -> None:
    """Raise :class:`InvalidSettingError` if ``invalid`` is true."""
    if invalid:
        raise InvalidSettingError(key, problem)


class Origins(dict[str, str]):
    """Dotted key → the file or command line that set it; the file for keys that were not set."""

    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.otherwise = otherwise

    def __missing__(self, key: str) -> str:
        return self.otherwise


# Field is not declared as a field specifier, because mypy would then miss its positional default
@dataclass_transform()
@dataclass(repr=False)
class Settings:
    """Base of a class that declares its settings in its body, as annotated attributes with a default::

        max_graphs: int = Field(4, ge=1)
        \"""Input shapes captured.\"""

    Each subclass becomes a pydantic dataclass: the constructor takes the settings in that order, and those after
    ``_: KW_ONLY`` as keywords only. ``--help`` prints the string below each setting. Text is converted to numbers and
    bools, but a bool is no number. One text stands for a list of texts with one entry. Error messages about a wrong
    type show ``Field(examples=…)``, as they are written in YAML.

    Class arguments:
        eq: Compare by settings (default), or by identity, in this class and its subclasses.
        strict: Do not convert text, in this class and its subclasses. Default: False.

    Attributes:
        not_recorded: Settings that ``repr`` leaves out.
        also_called: Names of settings in other programs → the key that an error message suggests for them.

    Raises:
        ConfigError: A value is invalid; names the key.
    """

    not_recorded: ClassVar[tuple[str, ...]] = ()
    also_called: ClassVar[Mapping[str, str]] = {}
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    __pydantic_fields__: ClassVar[dict[str, FieldInfo]]
    _eq: ClassVar[bool] = True
    _strict: ClassVar[bool] = False
    _construct: ClassVar[Callable[..., None]]  # pydantic's constructor

    def __init_subclass__(cls, *, eq: bool | None = None, strict: bool | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._eq, cls._strict = cls._eq if eq is None else eq, cls._strict if strict is None else strict
        config = ConfigDict(
            strict=cls._strict, coerce_numbers_to_str=not cls._strict, extra="forbid", allow_inf_nan=False
        )
        dataclass(cls, eq=cls._eq, repr=False, config=config)
        if not cls._eq:
            cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__  # type: ignore[assignment, method-assign]
        cls._construct, signature = cls.__init__, inspect.signature(cls)

        @functools.wraps(cls.__init__)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if unknown := [name for name in kwargs if name not in signature.parameters]:
                hint = did_you_mean(unknown[0], signature.parameters)
                raise TypeError(f"{cls.__name__} has no setting {unknown[0]!r}{hint}")
            try:
                values = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{cls.__name__}: {error}; name the settings") from None
            with _one_line(cls, values):
                cls._construct(self, **values)

        cls.__init__ = __init__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        self.check_settings()
        self.reset()

    @classmethod
    def read(cls, values: Mapping[Any, Any], prefix: str = "", origins: Origins | None = None) -> Self:
        """Build an instance from plain values, such as parsed YAML.

        Args:
            values: Key → value; sections are mappings.
            prefix: Prefix of the keys in error messages, such as ``tune.``.
            origins: Where each dotted key was set, for error messages.

        Raises:
            ConfigError: Names the key, and the closest known one or what is allowed.
        """
        instance = cls.__new__(cls)
        with _one_line(cls, values, prefix, origins):
            cls._construct(instance, **{str(key): value for key, value in values.items()})
        return instance

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bools_for_numbers(cls, value: Any, info: Any) -> Any:
        field = cls.__pydantic_fields__[info.field_name]
        kinds = leaf_types(field.annotation)
        is_mapping = isinstance(value, dict) and section_of(field) is None
        items = value.values() if is_mapping else value if isinstance(value, list) else [value]
        if not {bool, Any} & kinds and any(isinstance(item, bool) for item in items):
            raise PydanticCustomError("bool", "is a bool")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _list_of_one_text(cls, value: Any, info: Any) -> Any:
        hint = cls.__pydantic_fields__[info.field_name].annotation
        return [value] if isinstance(value, str) and _is_list(hint) and str in leaf_types(hint) else value

    def check_settings(self) -> None:
        """Raise :class:`InvalidSettingError`, or ValueError without a key, for settings that cannot be combined."""

    def reset(self) -> None:
        """Initialize the attributes that are not settings. A subclass must call ``super().reset()``."""

    def __repr__(self) -> str:
        recorded = [name for name in fields_of(type(self)) if name not in self.not_recorded]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in recorded)})"


def fields_of(cls: type[Settings]) -> dict[str, FieldInfo]:
    """The settings of a class in the order of its constructor."""
    return {name: cls.__pydantic_fields__[name] for name in inspect.signature(cls).parameters}


def section_of(field: FieldInfo) -> type[Settings] | None:
    """The class of a field ``Section`` or ``Section | None``; None for a plain value."""
    options = (field.annotation, *typing.get_args(field.annotation))
    return next((o for o in options if isinstance(o, type) and issubclass(o, Settings)), None)


def keys_of(cls: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[Settings]]]:
    """Every dotted key with its field and the class that has it; sections precede their keys."""
    for name, field in fields_of(cls).items():
        yield prefix + name, field, cls
        if (section := section_of(field)) is not None:
            yield from keys_of(section, f"{prefix}{name}.")


def time_units(field: FieldInfo) -> tuple[str, ...]:
    """The units of a field that is a :class:`ComposerTime`; empty for another field."""
    units: tuple[str, ...] = _bounds(field).get("units", ())
    return units


def doc_of(cls: Any, name: str) -> str:
    """The string literal below a setting in the body of its class, as one line."""
    return _docs(cls).get(name, "")


@functools.cache
def _docs(cls: type) -> dict[str, str]:
    """The string literal below each annotated attribute of a class and its bases, as one line each."""
    docs: dict[str, str] = {}
    for base in (b for b in reversed(cls.__mro__) if issubclass(b, Settings) and b is not Settings):
        [body] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, doc in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = doc.value.value if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) else ""
                docs[field.target.id] = " ".join(str(text).split())
    return docs


# Types of settings beyond Python's


@dataclasses.dataclass(frozen=True)
class ComposerTime:
    """Metadata of text that is a Composer time: ``Annotated[str, ComposerTime(DURATION_UNITS, gt=0)]``.

    Attributes:
        units: The units allowed; ``dur`` takes a fraction of at most 1.
        gt: What its number must exceed.
    """

    units: tuple[str, ...]
    gt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, value: str | None) -> str | None:
        if value is None:
            return value
        time = re.fullmatch(r"(\d+|\d*\.\d+(?=dur))([a-z]+)", value)
        if not time or time[2] not in self.units or (time[2] == "dur" and float(time[1]) > 1):
            units = ", ".join(self.units)
            raise ValueError(f"must be a Composer time, a number with one of the units {units}, not {value!r}")
        if self.gt is not None and float(time[1]) <= self.gt:
            raise ValueError(f"must be above {self.gt}, not {value!r}")
        return value


def _file_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ValueError(f"must be letters, digits, '.', '_' and '-' (100 at most, no folder), not {value!r}")
    return value


FileName = typing.Annotated[str, AfterValidator(_file_name)]
"""Text that becomes part of a file name."""


# Types and bounds in words


def leaf_types(hint: Any) -> set[Any]:
    """The types that a type is made of, without lists, unions, annotations and the keys of mappings: str, None and so
    on."""
    if typing.get_origin(hint) in (list, dict, types.UnionType, typing.Union, typing.Annotated):
        return set().union(*map(leaf_types, _options(hint)[typing.get_origin(hint) is dict :]))
    return {hint}


def _union_options(hint: Any) -> Sequence[Any]:
    """The types that a union allows, or the only one."""
    if typing.get_origin(hint) is typing.Annotated:
        return _union_options(_options(hint)[0])
    return _options(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else [hint]


def _is_list(hint: Any) -> bool:
    """Whether it allows lists, and nothing else but None."""
    options = [option for option in _union_options(hint) if option is not types.NoneType]
    return bool(options) and all(typing.get_origin(option) is list for option in options)


def _options(hint: Any) -> Sequence[Any]:
    options = typing.get_args(hint)
    return options[:1] if typing.get_origin(hint) is typing.Annotated else options


def _spell(
    hint: Any, names: Mapping[Any, str], literal: Callable[[Sequence[Any]], str], union: str, listed: str
) -> str:
    def spell(hint: Any) -> str:
        origin = typing.get_origin(hint)
        if origin is typing.Literal:
            return literal(_options(hint))
        if origin in (types.UnionType, typing.Union, typing.Annotated):
            return union.join(map(spell, _options(hint)))
        if origin is list:
            item = spell(_options(hint)[0])
            return listed.format(f"{item[2:]}s" if item.startswith("a ") else item)
        if origin is dict and dict not in names:
            return f"dict[{', '.join(map(spell, typing.get_args(hint)))}]"
        if isinstance(hint, type) and issubclass(hint, Settings):
            return names[Settings]
        return names.get(hint) or names.get(origin) or (hint.__name__ if isinstance(hint, type) else str(hint))

    return spell(hint).replace("typing.", "")


_IN_HELP = {types.NoneType: "null", Settings: "section"}
_IN_ERRORS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null",
    dict: "a mapping", Settings: "a section of keys",
}  # fmt: skip
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _kind_in_words(field: FieldInfo, value: Any) -> str:
    """``a number or null``; or for a value of another type than those with examples, ``a list, such as [text]``."""
    kinds = _spell(field.annotation, _IN_ERRORS, _one_of, " or ", "a list of {}")
    if not field.examples or isinstance(value, list):
        return kinds
    if _is_list(field.annotation):
        kinds = "a list"
    return f"{kinds}, such as {' or '.join(field.examples)}"


def _one_of(options: Sequence[Any]) -> str:
    *first, last = map(repr, options)
    return f"{', '.join(first)} or {last}" if first else last


def _bounds(field: FieldInfo) -> dict[str, Any]:
    """The bounds of a field or of its items, by pydantic's names, and ``units``."""

    def metadata(hint: Any) -> Iterator[Any]:
        for rule in getattr(hint, "__metadata__", ()):
            yield from rule.metadata if isinstance(rule, FieldInfo) else [rule]
        for option in typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal else ():
            yield from metadata(option)

    rules = [*field.metadata, *metadata(field.annotation)]
    names = (*_SIGNS, "units")
    return {name: v for rule in rules for name in names if (v := getattr(rule, name, None)) is not None}


def _bounds_in_words(bounds: Mapping[str, Any]) -> str:
    if "ge" in bounds and len(bounds) > 1:  # "1 to 4096" and "0 to below 1"
        return f"{bounds['ge']} to {bounds['le'] if 'le' in bounds else 'below {lt}'.format(**bounds)}"
    return " and ".join(f"{_WORDS[sign]} {bound}" for sign, bound in bounds.items())


def key_line(key: str, field: FieldInfo) -> str:
    """A key for ``--help``: ``data.batch_size: int = 40  [>= 1; <= 1000000]``."""
    default = field.get_default(call_default_factory=True)
    shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))
    bounds = _bounds(field)
    limits = [f"{_SIGNS[name]} {bound}" for name, bound in bounds.items() if name in _SIGNS]
    limits += [f"units {', '.join(bounds['units'])}"] if "units" in bounds else []
    hint = _spell(field.annotation, _IN_HELP, lambda options: "|".join(map(str, options)), "|", "list[{}]")
    return f"{key}: {hint} = {shown}" + (f"  [{'; '.join(limits)}]" if limits else "")


def help_lines(cls: type[Settings], prefix: str = "", omit: str = "") -> Iterator[str]:
    """The settings of a class and of its sections, except ``omit``: :func:`key_line` and the doc line of each."""
    for key, field, owner in keys_of(cls, prefix):
        name = key.rpartition(".")[2]
        doc = doc_of(owner, name)
        if section_of(field) is not None:
            yield from ("", f"{key}  ({doc})")
            if types.NoneType in typing.get_args(field.annotation):
                default = "null" if field.default_factory is None else "the section's defaults"
                yield f"{key}: section or null = {default}"
        elif name != omit:
            yield from (key_line(key, field), f"    {doc}")


def keys_help(cls: type[Settings], prefix: str = "") -> str:
    """The keys of a program for ``--help``; see :func:`help_lines`."""
    return textwrap.indent("\n".join(help_lines(cls, prefix)), "  ")


# Errors in one line

_UNKNOWN = ("unexpected_keyword_argument", "invalid_key")
_BOUND = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number")


@contextlib.contextmanager
def _one_line(
    cls: type[Settings], values: Mapping[Any, Any], prefix: str = "", origins: Origins | None = None
) -> Iterator[None]:
    """Turn a ValidationError of ``cls`` in the block into a ConfigError; see :meth:`Settings.read`."""
    try:
        yield
    except ValidationError as error:
        key, problem = _explain(error, cls, values, prefix)
        raise ConfigError(problem if origins is None else f"{origins[key]}: {problem}") from None


def _keys_beside(name: str, known: Sequence[str]) -> str | None:
    """``; optimizer has: lr, beta1``, for an unknown key that no other is like."""
    section = name.rpartition(".")[0]
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    if section and 0 < len(beside) <= 20:
        return f"; {section} has: {', '.join(beside)}"
    return "; --help lists all keys" if len(known) > 20 else None


def _explain(error: ValidationError, cls: type[Settings], values: Any, prefix: str) -> tuple[str, str]:
    """The key of the first error, and a sentence about it; unknown keys come before invalid values."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] in _UNKNOWN), errors[0])
    location, cause = first["loc"], first.get("ctx", {}).get("error")
    names: list[str] = []
    field, section = None, cls
    for name in location:  # without what follows a field: the index of an item, or the option of a union
        if section is None or name not in (fields := fields_of(section)):
            break
        field, values = fields[str(name)], values.get(name) if isinstance(values, Mapping) else None
        section = section_of(field)  # type: ignore[assignment]
        names.append(str(name))
    key = f"{prefix}{'.'.join(names)}".removesuffix(".")
    if first["type"] in _UNKNOWN:
        name = ".".join([*names, str(location[-1])])
        known = [key for key, _, _ in keys_of(cls)]
        meant = cls.also_called.get(str(location[-1]))
        if name in known:  # a key of the YAML with a dot in it
            hint = f"; write {name.replace('.', ': {')}: …{'}' * name.count('.')} in a YAML file"
        elif meant is not None:
            hint = f"; did you mean {meant!r}?"
        else:
            hint = did_you_mean(name, known, prefix, otherwise=_keys_beside(name, known))
        return prefix + name, f"unknown key {prefix + name!r}{hint}"
    if isinstance(cause, InvalidSettingError):
        key = f"{key}.{cause.key}".removeprefix(".")
        return key, f"{key} {cause.problem}"
    if isinstance(cause, Refusal):
        raise cause
    if cause is not None:  # check_settings() names no key of its class; a check of a field ends a sentence about it
        return key, f"{key} {cause}" if section is None else f"{key}: {cause}".removeprefix(": ")
    assert field is not None
    outside = next(
        (e for e in errors if e["loc"][: len(names)] == location[: len(names)] and e["type"] in _BOUND), None
    )
    if outside is None:
        return key, f"{key} must be {_kind_in_words(field, values)}, not {values!r}"
    allowed = "a finite number" if outside["type"] == "finite_number" else _bounds_in_words(_bounds(field))
    return key, f"{key} must be {allowed}, not {outside['input']}"
