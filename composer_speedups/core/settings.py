"""Settings: each is declared once, with type, default, bounds and doc line, in the body of a pydantic model.

Config sections, tasks, techniques and callbacks derive from :class:`Settings`.
"""

from __future__ import annotations

import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Union, dataclass_transform, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from composer_speedups.core.errors import ConfigError, did_you_mean

DURATION_UNITS = ("ep", "ba", "sp", "tok")  # units of Composer's time strings
Check = tuple[object, str, str]  # whether settings exclude each other, the key to name, the end of a sentence about it


def refuse(checks: Iterable[Check]) -> None:
    if lines := [f"{key} {problem}" for excluded, key, problem in checks if excluded]:
        raise ConfigError.of(lines)


# Field is not declared as a field specifier, because mypy would then miss its positional default
@dataclass_transform()
class Settings(BaseModel):
    """Base of a class that declares its settings in its body, as annotated attributes with a default and a doc line.

    The constructor takes them in that order or by name, and those in ``not_recorded`` by name only; it raises a
    ConfigError with one line for each invalid value. Text is converted to numbers and bools (not with the class
    argument ``strict=True``), but a bool is no number. One text stands for a list of texts with one entry. Instances
    are compared by settings, or by identity with the class argument ``eq=False``.
    """

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        populate_by_name=True,
    )
    not_recorded: ClassVar[tuple[str, ...]] = ()  # settings that repr leaves out
    option: ClassVar[str] = ""  # of a class in a union: the key and value that choose it, ``model.task: mlm``

    @classmethod
    def __pydantic_init_subclass__(cls, *, eq: bool = True, **_: Any) -> None:
        if not eq:
            cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__  # type: ignore[assignment, method-assign]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept the class arguments; pydantic consumes its own and passes the others on to this method."""

    def __init__(self, /, *args: Any, **settings: Any) -> None:
        names = [name for name in type(self).model_fields if name not in self.not_recorded]
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} settings without a name, not {len(args)}")
        try:
            super().__init__(**dict(zip(names, args, strict=False)), **settings)
        except ValidationError as error:
            raise ConfigError.of([f"{type(self).__name__}: {line}" for line in mistakes(type(self), error)]) from None

    # so that pydantic validates a section without a call of the constructor, and lists all mistakes of all sections
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def read(cls, values: Mapping[Any, Any], prefix: str = "", origins: Mapping[str, str] | None = None) -> Self:
        """Build an instance from plain values, such as parsed YAML; ``prefix`` and ``origins`` are for the errors."""
        try:
            return cls.model_validate({str(key): value for key, value in values.items()})
        except ValidationError as error:
            raise ConfigError.of(mistakes(cls, error, prefix, origins)) from None

    def replaced(self, **changes: Any) -> Self:
        """A copy with other settings, which are checked."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    @classmethod
    def key_of(cls, name: str) -> str:
        return name

    @field_validator("*", mode="before")
    @classmethod
    def _accept(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        kinds = parts_of(field.annotation)
        lists = {get_origin(option) or option for option in _options(field.annotation)} - {types.NoneType} == {list}
        if isinstance(value, str) and str in kinds and lists:
            return [value]
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        numbers = not sections_of(field) and {int, float, str} & kinds and not {bool, Any} & kinds
        for item in items:
            if isinstance(item, str) and re.search("[\0\ud800-\udfff]", item):
                raise PydanticCustomError("odd", "must not contain NUL or a surrogate")
            if isinstance(item, int) and item.bit_length() > 63:
                raise PydanticCustomError("odd", "must be less than 2**63")
            if isinstance(item, bool) and numbers:
                raise PydanticCustomError("odd", "must not be true or false")
        return value

    def model_post_init(self, context: Any, /) -> None:
        found = [(key, problem) for excluded, key, problem in self.checks() if excluded]
        if found:
            raise PydanticCustomError("checks", "{found}", {"found": found})
        self.reset()

    def checks(self) -> Iterable[Check]:
        """Settings that cannot be combined; asked if each of them is valid alone."""
        return ()

    def reset(self) -> None:
        """Initialize the attributes that are not settings. A subclass must call ``super().reset()``."""

    if not typing.TYPE_CHECKING:  # otherwise mypy would accept any attribute
        __setattr__ = object.__setattr__

    def __repr__(self) -> str:
        recorded = [name for name in type(self).model_fields if name not in self.not_recorded]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in recorded)})"

    __str__ = __repr__


def fields_of(cls: type[Settings]) -> dict[str, FieldInfo]:
    """The settings of a class by their names in YAML; those of its bases that ``repr`` leaves out are last."""
    fields = sorted(cls.model_fields.items(), key=lambda item: item[0] in cls.not_recorded)
    return {field.alias or name: field for name, field in fields}


def sections_of(field: FieldInfo) -> list[type[Settings]]:
    """The class of a field that is a section, or the classes of a union of sections; empty for plain values."""
    return [
        option for option in _options(field.annotation) if isinstance(option, type) and issubclass(option, Settings)
    ]


def keys_of(cls: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[Settings]]]:
    """Every dotted key with its field and the class that has it; sections precede their keys."""
    for name, field in fields_of(cls).items():
        key = prefix + cls.key_of(name)
        yield key, field, cls
        for section in sections_of(field):
            yield from keys_of(section, prefix if section.option else f"{key}.")


def doc_of(field: FieldInfo) -> str:
    """The string literal below a setting in the body of its class, as one line."""
    return " ".join((field.description or "").split())


# Types of settings beyond Python's


@dataclass(frozen=True)
class ComposerTime:
    """Metadata of text that is a Composer time: ``Annotated[str, ComposerTime(DURATION_UNITS, gt=0)]``."""

    units: tuple[str, ...]  # ``dur`` takes a fraction of at most 1
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
            raise ValueError(f"must be greater than {self.gt}, not {value!r}")
        return value


def _file_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ValueError(f"must be letters, digits, '.', '_' and '-' (100 at most, no folder), not {value!r}")
    return value


FileName = Annotated[str, AfterValidator(_file_name)]
"""Text that becomes part of a file name."""


def _options(hint: Any) -> list[Any]:
    """The types that a union allows, or the only one, without annotations."""
    if get_origin(hint) is Annotated:
        return _options(get_args(hint)[0])
    return [o for a in get_args(hint) for o in _options(a)] if get_origin(hint) in (types.UnionType, Union) else [hint]


def parts_of(hint: Any) -> set[Any]:
    """The types that a type is made of: str, NoneType, list and so on, with those of items, but not of keys."""
    parts = set()
    for option in _options(hint):
        kind = get_origin(option) or option
        parts |= {kind}.union(*map(parts_of, get_args(option)[kind is dict :] if kind in (list, dict) else ()))
    return parts


# --help

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _kind(hint: Any) -> str:
    """``int|null``, ``list[str]``, ``model|blocks``."""
    args, options = get_args(hint), _options(hint)
    if len(options) > 1 or options[0] is not hint:
        return "|".join(map(_kind, options))
    if get_origin(hint) is Literal:
        return "|".join(map(str, args))
    if args:
        return f"{get_origin(hint).__name__}[{', '.join(map(_kind, args))}]"
    return "null" if hint is types.NoneType else getattr(hint, "__name__", str(hint))


def key_line(key: str, field: FieldInfo) -> str:
    """A key for ``--help``: ``data.batch_size: int = 40  [>= 1; <= 1000000]``."""
    default = field.get_default(call_default_factory=True)
    shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))
    bounds = [(sign, getattr(rule, name, None)) for rule in field.metadata for name, sign in _SIGNS.items()]
    limits = [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    limits += [f"units {', '.join(rule.units)}" for rule in field.metadata if isinstance(rule, ComposerTime)]
    return f"{key}: {_kind(field.annotation)} = {shown}" + (f"  [{'; '.join(limits)}]" if limits else "")


def help_lines(cls: type[Settings], prefix: str = "", omit: str = "") -> Iterator[str]:
    """The settings of a class and of its sections, except ``omit``: :func:`key_line` and the doc line of each."""
    for name, field in fields_of(cls).items():
        key, sections = prefix + cls.key_of(name), sections_of(field)
        for section in sections:
            yield from ("", f"with {section.option}" if section.option else f"{key}  ({doc_of(field)})")
            if types.NoneType in _options(field.annotation):
                yield f"{key}: section or null = {'null' if field.default_factory is None else 'its defaults'}"
            yield from help_lines(section, prefix if section.option else f"{key}.")
        if not sections and name != omit:
            yield from (key_line(key, field), f"    {doc_of(field)}")


def keys_help(cls: type[Settings], prefix: str = "") -> str:
    return textwrap.indent("\n".join(help_lines(cls, prefix)), "  ")


# All mistakes, one line each

_BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number")


def mistakes(
    cls: type[Settings], error: ValidationError, prefix: str = "", origins: Mapping[str, str] | None = None
) -> list[str]:
    """What is wrong with values of ``cls``, one line for each, unknown keys first."""
    unknown, problems = dict[str, str](), list[tuple[str, str]]()
    wrong: dict[str, tuple[FieldInfo, list[Any]]] = {}
    for e in error.errors(include_url=False):
        names, options, field, item, known = list[str](), [cls], FieldInfo(), "", list[str]()
        for part in e["loc"]:
            if owner := next((option for option in options if part in fields_of(option)), None):
                field = fields_of(owner)[str(part)]
                names += [owner.key_of(str(part))] if owner.key_of(str(part)) else []
                options = sections_of(field) or [rule.section() for rule in field.metadata if hasattr(rule, "section")]
                known = [*fields_of(options[0])] if options and (known or not sections_of(field)) else known
            elif chosen := [option for option in options if option.option.endswith(f": {part}")]:
                options = chosen
            elif isinstance(part, int):
                item += f"[{part}]"
        key, last = ".".join(names), str(e["loc"][-1]) if e["loc"] else ""
        if e["type"] == "extra_forbidden":
            name = ".".join(filter(None, [key, options[0].key_of(last)]))
            unknown[prefix + name] = _unknown(cls, options[0], name, prefix, [f"{key}.{k}" for k in known])
        elif e["type"] == "checks":
            problems += [(f"{prefix}{key}.{k}" if key else prefix + k, problem) for k, problem in e["ctx"]["found"]]
        elif e["type"].startswith("union_tag"):
            tags = ", ".join(option.option.rpartition(": ")[2] for option in options)
            problems.append((options[0].option.partition(":")[0], f"must be one of {tags}, not {e['ctx'].get('tag')}"))
        else:
            wrong.setdefault(prefix + key + item, (field, []))[1].append(e)
    for key, (field, found) in wrong.items():
        if not any(other.startswith(f"{key}[") for other in wrong):  # otherwise an item of a list is wrong
            problems.append((key, _wrong(field, found)))
    lines = [*unknown.items(), *((key, f"{key} {problem}") for key, problem in problems)]
    return [line if origins is None else f"{origins[key.partition('[')[0]]}: {line}" for key, line in lines]


def _unknown(cls: type[Settings], owner: type[Settings], name: str, prefix: str, known: Sequence[str]) -> str:
    keys = [(key, option) for key, _, option in keys_of(cls)]
    if readers := [option.option for key, option in keys if key == name and option.option]:
        chosen = owner.option.rpartition(": ")[2]
        others = " or ".join(reader.rpartition(": ")[2] for reader in readers)
        return f"{name} is for {readers[0].partition(':')[0]}: {others}, not {chosen}; remove it"
    known = known or [*dict.fromkeys(key for key, _ in keys)]
    if name in known:  # it was written with a dot
        hint = f"; write {name.replace('.', ': {')}: …{'}' * name.count('.')} in a YAML file"
    else:
        hint = did_you_mean(name, known, prefix, otherwise="; --help lists all keys" if len(known) > 20 else None)
    return f"unknown key {prefix + name!r}{hint}"


def _wrong(field: FieldInfo, errors: list[Any]) -> str:
    """The predicate of a sentence about a value, from pydantic's errors, one for each type that the key may have."""
    errors = [e for e in errors if e["type"] in _BOUNDS] or errors
    first = errors[0]
    if first["type"] in ("value_error", "odd"):
        return str(first.get("ctx", {}).get("error", first["msg"]))
    if first["type"].endswith("too_short"):
        return "must not be empty"
    kinds = [re.sub(r"^Input should be |a valid dictionary or .*|, (unable|got) .*", "", e["msg"]) for e in errors]
    kinds = [re.sub("a valid (int)?", lambda found: "an int" if found[1] else "a ", kind) for kind in kinds]
    kinds = [{"": "a section of keys", "None": "null"}.get(kind, kind) for kind in kinds]
    if types.NoneType in _options(field.annotation) and first["type"] not in _BOUNDS:
        kinds.append("null")
    examples = f", such as {' or '.join(field.examples)}" if field.examples and first["type"] not in _BOUNDS else ""
    return f"must be {' or '.join(dict.fromkeys(kinds))}{examples}, not {first['input']!r}"
