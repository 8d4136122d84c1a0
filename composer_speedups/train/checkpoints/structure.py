"""Check that a value read from a file has the expected structure: types, keys, lengths and shapes."""

from __future__ import annotations

import types
import typing
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["MalformedError", "conforming", "like"]

_DEEPEST = 30  # nested levels of plain values


class MalformedError(ValueError):
    """A value in a checkpoint does not have the expected structure.

    Args:
        where: The path of keys to it, such as ``state/timestamp/Timestamp/batch``.
        reason: The end of a sentence that begins with ``where``.
    """

    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(f"{where} {reason}")


def conforming(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` in new containers if it matches a type hint.

    Args:
        value: Any value.
        hint: A class, for instances of exactly that class (an int is accepted for a float); a union, list, tuple or
            dict of hints; ``Annotated[int, range(…)]``; a ``TypedDict``, or a dict of field names and hints, whose
            fields must all be present, and no others; ``Tensor``, for a dense tensor in host memory; ``Any``, for
            JSON-like values; ``object``, which is not checked.
        where: The path of keys to the value.

    Raises:
        MalformedError: It does not match.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is object:
        return value
    if hint is Any:
        return _plain(value, where)
    if typing.is_typeddict(hint):
        hint = typing.get_type_hints(hint, include_extras=True)
    if isinstance(hint, dict):
        _check_type(value, dict, where)
        _check_keys(value, hint, where)
        return {name: conforming(value[name], each, f"{where}/{name}") for name, each in hint.items()}
    if origin is typing.Annotated:
        if conforming(value, arguments[0], where) not in arguments[1]:
            raise MalformedError(where, f"is {value}, not within {arguments[1][0]} to {arguments[1][-1]}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, arguments, where)
    if origin is list:
        _check_type(value, list, where)
        return [conforming(each, arguments[0], f"{where}/{i}") for i, each in enumerate(value)]
    if origin is tuple:
        _check_type(value, tuple, where)
        hints = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(value) != len(hints):
            raise MalformedError(where, f"has {len(value)} entries, not {len(hints)}")
        return tuple(conforming(v, h, f"{where}/{i}") for i, (v, h) in enumerate(zip(value, hints, strict=True)))
    if origin is dict:
        _check_type(value, dict, where)
        for name in value:
            _check_type(name, arguments[0], f"a key of {where}")
        entries = dict.items(value)  # not by attribute access: an OrderedDict keeps attributes of any name
        return {name: conforming(each, arguments[1], f"{where}/{name}") for name, each in entries}
    if hint is Tensor:
        return _dense(value, where)
    if hint is float and type(value) is int:
        if value.bit_length() > 1023:
            raise MalformedError(where, "is an int too large for a float")
        return value
    _check_type(value, hint, where)
    return value


def like(value: Any, own: Any, where: str) -> Any:
    """Return ``value`` in new containers if it has the structure of ``own``, a value of this run.

    Numbers match regardless of their class and are converted to the form of ``own``, since some optimizers keep them in
    0-dimensional tensors. So do floating-point dtypes, which torch casts when loading.

    Raises:
        MalformedError: Its keys, length, shape or kind differ.
    """
    if isinstance(own, Tensor):
        if own.ndim == 0 and _is_number(value):
            return torch.tensor(value, dtype=own.dtype)
        return _like_tensor(value, own, where)
    if isinstance(own, dict):
        _check_type(value, dict, where)
        _check_keys(value, own, where)
        return {name: like(value[name], each, f"{where}/{name}") for name, each in own.items()}
    if isinstance(own, (list, tuple)):
        if type(value) not in (list, tuple) or len(value) != len(own):
            size = f"of {len(value)} " if isinstance(value, (list, tuple)) else ""
            raise MalformedError(where, f"is {_kind(value)} {size}and not {_kind(own)} of {len(own)}")
        return type(own)(like(v, o, f"{where}/{i}") for i, (v, o) in enumerate(zip(value, own, strict=True)))
    if own is None or isinstance(own, bool):  # such as foreach=None, which a technique sets to True
        if value is None or type(value) in (bool, int, float):
            return value
    elif isinstance(own, (int, float)):
        if _is_number(value):
            return value
        if isinstance(value, Tensor) and value.ndim == 0:
            return _dense(value, where).item()
    elif type(value) is type(own):
        return value
    raise MalformedError(where, f"is {_kind(value)}, not {_kind(own)}")


def _like_tensor(value: Any, own: Any, where: str) -> Tensor:
    wraps = is_traceable_wrapper_subclass(own) and not isinstance(own, DTensor)
    if wraps and type(value) is type(own):
        inner, settings = own.__tensor_flatten__()
        held, its_settings = value.__tensor_flatten__()
        if held != inner or its_settings != settings or value.shape != own.shape:
            raise MalformedError(where, f"is {_kind(value)} of another shape or with other settings")
        parts = {name: _like_tensor(getattr(value, name), getattr(own, name), f"{where}/{name}") for name in inner}
        return type(own).__tensor_unflatten__(parts, settings, own.shape, own.stride())  # type: ignore[attr-defined]
    if wraps:
        raise MalformedError(where, f"is {_kind(value)}, not {_kind(own)}")
    dense = _dense(value, where)
    if dense.shape != own.shape:
        raise MalformedError(where, f"has the shape {tuple(dense.shape)}, not {tuple(own.shape)}")
    if dense.is_floating_point() != own.is_floating_point():
        raise MalformedError(where, f"has the dtype {_format(dense.dtype)}, not {_format(own.dtype)}")
    return dense


def _dense(value: Any, where: str) -> Tensor:
    """A tensor with its storage only; torch restores additional attributes of any name."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise MalformedError(where, f"is {_kind(value)}, not a tensor")
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.dtype.is_complex:
        kind = "quantised" if value.is_quantized else "complex" if value.dtype.is_complex else "sparse or nested"
        raise MalformedError(where, f"is a {kind} tensor, not a dense one")
    if value.device.type != "cpu":
        raise MalformedError(where, f"is a tensor without values (on the device {value.device})")
    return Tensor.detach(value)  # not by attribute access


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise MalformedError(where, f"is nested deeper than {_DEEPEST} levels")
    if type(value) in (list, tuple):
        return type(value)(_plain(each, f"{where}/{i}", depth + 1) for i, each in enumerate(value))
    if type(value) is dict:
        for name in value:
            if type(name) not in (str, int):
                raise MalformedError(f"a key of {where}", f"is {_kind(name)}")
        return {name: _plain(each, f"{where}/{name}", depth + 1) for name, each in value.items()}
    if value is not None and type(value) not in (bool, int, float, str):
        raise MalformedError(where, f"is {_kind(value)}, not a plain value")
    return value


def _one_of(value: Any, hints: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in hints:
        return None
    faults = []
    for hint in hints:
        try:
            return conforming(value, hint, where)
        except MalformedError as error:
            faults.append(error)
    raise faults[0]


def _check_type(value: Any, wanted: Any, where: str) -> None:
    if type(value) is not wanted and not (wanted is dict and isinstance(value, dict)):
        raise MalformedError(where, f"is {_kind(value)}, not {_article(wanted.__name__)}")


def _check_keys(value: dict[Any, Any], wanted: dict[Any, Any], where: str) -> None:
    if missing := [name for name in wanted if name not in value]:
        raise MalformedError(where, f"has no {missing[0]}" + (f" (and {len(missing) - 1} more)" * (len(missing) > 1)))
    if more := [name for name in value if name not in wanted]:
        raise MalformedError(where, f"has {more[0]!r:.80}, which this run does not have")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _kind(value: Any) -> str:
    return "nothing" if value is None else _article(type(value).__name__)


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def _format(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
