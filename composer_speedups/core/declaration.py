"""Settings declared once, in the body of a class: the constructor, ``repr`` and all checks are derived from them."""

from __future__ import annotations

import inspect
import operator
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from pydantic.fields import FieldInfo

from composer_speedups.core.settings import Spelling

__all__ = ["Declared", "Setting"]

_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}


class Setting(NamedTuple):
    hint: Any
    default: Any
    bounds: Mapping[str, float]  # keys "ge", "gt", "le" and "lt", named as in pydantic's Field
    keyword_only: bool

    def problem(self, value: Any) -> str | None:
        """Describe what is wrong with a value, as the end of a sentence; None if it is valid."""
        if not _accepts(self.hint, value):
            return f"must be {_IN_ERRORS.of(self.hint)}, not {value!r}"
        if value is not None and not all(_HOLDS[sign](value, bound) for sign, bound in self.bounds.items()):
            return f"must be {_format_bounds(self.bounds)}, not {value!r}"
        return None


# Field is not declared as a field specifier, because mypy would then miss its positional default
@dataclass_transform()
class Declared:
    """Base of a class that declares its settings in its body, as annotated attributes with a default::

        max_graphs: int = Field(4, ge=1)
        \"""Input shapes captured.\"""

    The constructor takes the settings in that order, and those after ``_: KW_ONLY`` as keywords only. Types are strict:
    a bool is not accepted for an int, but an int is accepted for a float. ``--help`` prints the string below each
    setting.

    Attributes:
        settings: Name → declaration.
        not_recorded: Settings that ``repr`` leaves out.
    """

    settings: ClassVar[dict[str, Setting]] = {}
    not_recorded: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own, keyword_only = {}, False
        for name, hint in inspect.get_annotations(cls, eval_str=True).items():
            keyword_only |= hint is KW_ONLY
            if not name.startswith("_") and typing.get_origin(hint) is not ClassVar:
                field = FieldInfo.from_annotated_attribute(hint, vars(cls)[name])
                bounds = {
                    sign: getattr(rule, sign) for rule in field.metadata for sign in _HOLDS if hasattr(rule, sign)
                }
                own[name] = Setting(hint, field.default, bounds, keyword_only)
                setattr(cls, name, field.default)
        declared = cls.settings | own
        cls.settings = dict(sorted(declared.items(), key=lambda item: item[1].keyword_only))
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what inspect.signature() looks at
            [
                inspect.Parameter(name, kinds[each.keyword_only], default=each.default, annotation=each.hint)
                for name, each in cls.settings.items()
            ]
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(type(self)).bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if problem := self.settings[name].problem(value):
                raise ValueError(f"{name} {problem}")
            setattr(self, name, value)
        self.check_settings()
        self.reset()

    def check_settings(self) -> None:
        """Raise ValueError for settings that cannot be combined."""

    def reset(self) -> None:
        """Initialize the attributes that are not settings. A subclass must call ``super().reset()``."""

    def __repr__(self) -> str:
        recorded = (f"{name}={getattr(self, name)!r}" for name in self.settings if name not in self.not_recorded)
        return f"{type(self).__name__}({', '.join(recorded)})"


def _accepts(hint: Any, value: Any) -> bool:
    options = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return any(value == option and type(value) is type(option) for option in options)
    if typing.get_origin(hint) is list:
        return type(value) is list and all(_accepts(options[0], item) for item in value)
    if options:  # a union type
        return any(_accepts(option, value) for option in options)
    if hint is float:
        return type(value) in (int, float)
    return hint is Any or type(value) is hint


def _one_of(options: Sequence[Any]) -> str:
    *first, last = map(repr, options)
    return f"{', '.join(first)} or {last}" if first else last


_IN_ERRORS = Spelling(_one_of, "a list of {}", " or ")


def _format_bounds(bounds: Mapping[str, float]) -> str:
    names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    if "ge" in bounds and len(bounds) > 1:  # formats "1 to 4096" and "0 to below 1"
        return f"{bounds['ge']} to {bounds['le'] if 'le' in bounds else 'below {lt}'.format(**bounds)}"
    return " and ".join(f"{names[sign]} {bound}" for sign, bound in bounds.items())
