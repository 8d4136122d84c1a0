"""torch's restricted unpickler, extended by what Composer's checkpoints need, without anything that runs code.

NumPy's classes are not allowed: NumPy rebuilds an array from the dtype and bytes in the file, and inconsistent ones can
crash the process. The only array in a checkpoint that Composer writes is the state of NumPy's random generator, which
the classes below read instead.

The nesting depth and the number of values are determined from the pickle's instructions before any of them is executed.
Python hashes a tuple recursively in C, so a million nested tuples overflow the stack. A list that contains another list
twice, repeated forty times, takes a few hundred bytes and has more entries than fit in any memory.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import os
import pickle
import pickletools
import re
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import _weights_only_unpickler, serialization
from torch.serialization import safe_globals

from composer_speedups.core.temporary_attribute import temporary_attribute

__all__ = [
    "Words",
    "reason_of",
    "restricted_unpickling",
]

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_COUNT = 624  # 32-bit words of a Mersenne Twister
_DEEPEST = 100
_SHARED = 100  # limit on the number of values, counted once per occurrence, relative to the number of instructions
_TAKEN = {
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "NEWOBJ": 2,
    "REDUCE": 2,
    "BINPERSID": 1,
}  # instructions that replace values on the stack by a new one
_ADDED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # instructions that add to the value below them on the stack

_Node = list  # the nodes of the parts of a value


class Words:
    """Replaces ``numpy.ndarray``: the 624 32-bit words of NumPy's random generator.

    Attributes:
        values: The words; empty until they are read.
    """

    values: tuple[int, ...] = ()

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, column_major, raw = state
        fits = version == 1 and shape == (_COUNT,) and type(kind) is _Kind and not column_major
        if not fits or type(raw) is not bytes or len(raw) != 4 * _COUNT:
            raise pickle.UnpicklingError(f"NumPy array of {shape!r:.80} other than NumPy's random state")
        self.values = struct.unpack(f"<{_COUNT}I", raw)


class _Kind:
    """Replaces ``numpy.dtype``: little-endian unsigned 32-bit integers."""

    def __init__(self, name: Any, align: Any = False, copy: Any = True) -> None:
        if name != "u4":
            raise pickle.UnpicklingError(f"NumPy dtype {name!r:.80} other than that of NumPy's random state")

    def __setstate__(self, state: Any) -> None:
        if state != (3, "<", None, None, None, -1, -1, 0):
            raise pickle.UnpicklingError("NumPy dtype other than that of NumPy's random state")


def _reconstruct(kind: Any, shape: Any, code: Any) -> Words:
    """Replaces the function with which NumPy unpickles arrays."""
    if kind is not Words:
        raise pickle.UnpicklingError("instance of a subclass of NumPy's array")
    return Words()


class _Reader(torch._C.PyTorchFileReader):  # type: ignore[misc]
    """torch's archive reader, which checks the pickle before torch reads it."""

    def get_record(self, name: str) -> bytes:
        record: bytes = super().get_record(name)
        if name == "data.pkl":
            _check_nesting(record)
        return record


_torch_legacy_load = serialization._legacy_load


def _legacy_load(file: Any, *arguments: Any, **settings: Any) -> Any:
    """Replaces torch's reader of its file format before 2020.

    Ranks exchange storages in that format as bytes in memory, which stays possible; checkpoints are files.
    """
    if isinstance(file, io.BytesIO):
        return _torch_legacy_load(file, *arguments, **settings)
    raise pickle.UnpicklingError("file of another kind than a zip archive")


_torch_types = _weights_only_unpickler._get_allowed_globals


@functools.cache
def _types() -> dict[str, Any]:
    """The types that torch's unpickler allows, without those whose memory depends on a number in the file."""
    allowed = _torch_types()
    return {name: value for name, value in allowed.items() if value not in (bytearray, *torch._tensor_classes)}


_ALLOWED: list[Any] = [
    (Words, "numpy.ndarray"),
    (_Kind, "numpy.dtype"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (_reconstruct, "numpy.core.multiarray._reconstruct"),  # the module's name before NumPy 2
    datetime.timedelta,
    torch.torch_version.TorchVersion,
]


@contextlib.contextmanager
def restricted_unpickling() -> Iterator[None]:
    """Restrict ``torch.load`` inside the block to tensors, plain values and the types above, whatever its caller
    requests.

    It uses torch's own environment variable, because Composer requests unrestricted loading. Other contents of a file
    raise ``pickle.UnpicklingError``.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with (
            safe_globals(_ALLOWED),
            temporary_attribute(_weights_only_unpickler, "_get_allowed_globals", _types),
            temporary_attribute(torch._C, "PyTorchFileReader", _Reader),
            temporary_attribute(serialization, "_legacy_load", _legacy_load),
        ):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def reason_of(error: pickle.UnpicklingError) -> str:
    """Summarize why a file was refused."""
    found = re.search(r"(?i)unsupported global:? (?:GLOBAL )?([\w.]+)", str(error))
    if found:
        return f"loading it would import {found[1]}, which checkpoints do not need"
    reason = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)
    return f"it holds more than weights and plain values ({reason.splitlines()[0][:200]})"


def _check_nesting(data: bytes) -> None:
    """Check a pickle as torch's restricted unpickler would read it, which supports few instructions.

    Raises:
        pickle.UnpicklingError: It nests too deeply, contains itself or one value too often, or is not a pickle.
    """
    try:
        nodes = _nodes(data)
    except (AttributeError, IndexError, KeyError, ValueError) as error:  # the stack or the memo lacks an entry
        raise pickle.UnpicklingError(f"not a pickle written by torch ({type(error).__name__})") from error
    sizes: dict[int, tuple[int, int]] = {}  # by id: nested levels, and number of values counted once per occurrence
    most = _SHARED * (len(nodes) + 1000)
    for first in nodes:
        open_nodes, entered = [first], set()
        while open_nodes:
            node = open_nodes[-1]
            if id(node) in sizes:
                open_nodes.pop()
            elif id(node) not in entered:
                entered.add(id(node))
                waiting = [each for each in node if id(each) not in sizes]
                if any(id(each) in entered for each in waiting):
                    raise pickle.UnpicklingError("value that contains itself")
                open_nodes += waiting
            else:
                inside = [sizes[id(each)] for each in node]
                levels, values = 1 + max((one for one, _ in inside), default=0), 1 + sum(other for _, other in inside)
                if levels > _DEEPEST:
                    raise pickle.UnpicklingError(f"values nested deeper than {_DEEPEST} levels")
                if values > most:
                    raise pickle.UnpicklingError("values that contain others too many times")
                sizes[id(node)] = levels, values
                open_nodes.pop()


def _nodes(data: bytes) -> list[_Node]:
    """Yield a node for each value that the pickle creates."""
    nodes: list[_Node] = []
    stack: list[_Node] = []
    below: list[list[_Node]] = []  # stacks, one per mark
    memo: dict[int, _Node] = {}
    argument: Any
    for instruction, argument, _ in pickletools.genops(data):
        name = instruction.name
        if name in ("PROTO", "STOP"):
            continue
        if name == "MARK":
            below.append(stack)
            stack = []
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("APPENDS", "SETITEMS"):
            items, stack = stack, below.pop()
            stack[-1] += items
        elif name in _ADDED:
            items = [stack.pop() for _ in range(_ADDED[name])]
            stack[-1] += items
        elif name == "TUPLE":
            items, stack = stack, below.pop()
            stack.append(items)
            nodes.append(items)
        elif instruction.stack_before and name not in _TAKEN:
            raise pickle.UnpicklingError(f"pickle instruction {name}, which torch does not write")
        else:
            node = [stack.pop() for _ in range(_TAKEN.get(name, 0))]
            stack.append(node)
            nodes.append(node)
    return nodes
