"""torch's restricted unpickler, extended by what Composer's checkpoints need, without anything that runs code.

NumPy's classes are not allowed: NumPy rebuilds an array from the dtype and bytes in the file, and inconsistent ones can
crash the process. The only array in a checkpoint that Composer writes is the state of NumPy's random generator, which
the classes below read instead.

The size of the archive's members is checked before they are unpacked: torch does not compress them, and 4 KB of
compressed zeros hold 4 MB of instructions. The nesting depth and the number of values are determined from the pickle's
instructions before any of them is executed. Python hashes a tuple recursively in C, so a million nested tuples overflow
the stack. A list that contains another list twice, repeated forty times, takes a few hundred bytes and has more entries
than fit in any memory.
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
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import _weights_only_unpickler, serialization
from torch.serialization import safe_globals

from composer_speedups.core.temporary_attribute import temporary_attribute

__all__ = [
    "Words",
    "check_archive",
    "reason_of",
    "restricted_unpickling",
]

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_COUNT = 624  # 32-bit words of a Mersenne Twister
_MAX_DEPTH = 100
_MAX_BYTES = 2**26  # of data.pkl, and
_MAX_INSTRUCTIONS = 2**24  # in it. ThroughputMonitor's record of a batch, the largest part of long runs, takes 13.
# Limits relative to the number of instructions: on the values inside a value, counted once per occurrence, and on their
# sum over all values, which bounds the time to hash and copy them.
_MAX_SHARED, _MAX_WORK = 10, 100
_TAKEN = {
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "NEWOBJ": 2,
    "REDUCE": 2,
    "BINPERSID": 1,
}  # instructions that replace values on the stack by a new one
_ADDED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # instructions that add to the value below them on the stack


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
    """torch's archive reader, which checks the archive and the pickle before torch reads them."""

    def __init__(self, file: Any) -> None:
        with zipfile.ZipFile(file) as archive:
            check_archive(archive)
        file.seek(0)
        super().__init__(file)

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


def check_archive(archive: zipfile.ZipFile) -> None:
    """Check the sizes of an archive's members, of which none is read.

    Raises:
        pickle.UnpicklingError: The members are compressed or overlap, or ``data.pkl`` is too large.
    """
    members = archive.infolist()
    assert archive.fp is not None
    if sum(member.file_size for member in members) > archive.fp.seek(0, os.SEEK_END):
        raise pickle.UnpicklingError("compressed members, which torch does not write")
    if any(member.file_size > _MAX_BYTES for member in members if member.filename.endswith("data.pkl")):
        raise pickle.UnpicklingError(f"pickle of more than {_MAX_BYTES} bytes")


class _Size:
    """The size of a value on the stack of the unpickler."""

    __slots__ = ("held", "levels", "values")

    def __init__(self) -> None:
        self.levels = self.values = 1  # nested levels, and values inside it, counted once per occurrence
        self.held = False  # inside another value


def _check_nesting(data: bytes) -> None:
    """Check a pickle as torch's restricted unpickler would read it, which supports few instructions.

    Raises:
        pickle.UnpicklingError: It has too many instructions, nests too deeply, contains itself or one value too often,
            or is not a pickle.
    """
    try:
        _measure(data)
    except (AttributeError, IndexError, KeyError, ValueError) as error:  # the stack or the memo lacks an entry
        raise pickle.UnpicklingError(f"not a pickle written by torch ({type(error).__name__})") from error


def _measure(data: bytes) -> None:
    plain = _Size()  # of every value that holds no others
    plain.held = True
    work = 0
    stack: list[_Size] = []
    below: list[list[_Size]] = []  # stacks, one per mark
    memo: dict[int, _Size] = {}
    argument: Any
    for number, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        name = instruction.name
        if number == _MAX_INSTRUCTIONS:
            raise pickle.UnpicklingError(f"more than {_MAX_INSTRUCTIONS} pickle instructions")
        if name in ("PROTO", "STOP"):
            continue
        if name == "MARK":
            below.append(stack)
            stack = []
            continue
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
            continue
        if name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            continue
        if name in ("APPENDS", "SETITEMS", "TUPLE"):
            items, stack = stack, below.pop()
        elif name in _TAKEN or name in _ADDED:
            items = [stack.pop() for _ in range(_TAKEN.get(name) or _ADDED[name])]
        elif instruction.stack_before:
            raise pickle.UnpicklingError(f"pickle instruction {name}, which torch does not write")
        else:
            stack.append(_Size() if name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET") else plain)
            continue
        if name == "TUPLE" or name in _TAKEN:
            stack.append(_Size())
        holder = stack[-1]
        for item in items:
            item.held = True
            holder.levels = max(holder.levels, 1 + item.levels)
            holder.values += item.values
            work += item.values
        if holder.held and items:  # an item may be the holder itself, or hold it
            raise pickle.UnpicklingError("value that contains itself, or to which another is added later")
        if holder.levels > _MAX_DEPTH:
            raise pickle.UnpicklingError(f"values nested deeper than {_MAX_DEPTH} levels")
        if holder.values > _MAX_SHARED * (number + 1000) or work > _MAX_WORK * (number + 1000):
            raise pickle.UnpicklingError("values that contain others too many times")
