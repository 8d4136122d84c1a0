"""Checkpoints of others: read without executing anything that they hold.

Composer unpickles a checkpoint with ``weights_only=False``, and evaluates the recorded ``repr`` of its own algorithms
as Python, even where only the weights are asked for. Either runs what the file's author wished.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import composer.algorithms
import numpy as np
import torch
from composer.utils.compression import is_compressed_pt
from composer.utils.file_helpers import is_tar
from torch.serialization import safe_globals

from composer_speedups.algorithms.catalogue import technique_names
from composer_speedups.algorithms.registry import technique_class
from composer_speedups.errors import ConfigError, first_line

__all__ = ["DamagedCheckpointError", "check_checkpoint", "check_recorded", "check_whole", "restricted_loading"]

# What a Composer checkpoint holds beside tensors and plain values: NumPy's random state, the time trained, a version.
_ALLOWED: list[Any] = [
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("bool", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")),
    (np._core.multiarray._reconstruct, "numpy._core.multiarray._reconstruct"),  # type: ignore[attr-defined]
    (np._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),  # type: ignore[attr-defined]
    datetime.timedelta,
    torch.torch_version.TorchVersion,
]
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_TRUST = "only if you trust whoever wrote it, set checkpoint.trust_checkpoint=true"


class DamagedCheckpointError(ConfigError):
    """A file that is no whole checkpoint: cut short, or with a bit that flipped."""


@contextlib.contextmanager
def restricted_loading(key: str, *, trust: bool) -> Iterator[None]:
    """``torch.load`` inside unpickles tensors, plain values and the few types above, whatever its caller asked for.

    It is torch's own switch, in the environment, since Composer asks for unrestricted loading.

    Args:
        key: The config key that names the checkpoint, for the error.
        trust: Change nothing.

    Raises:
        ConfigError: The checkpoint holds something else, which is named.
    """
    if trust:
        yield
        return
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with safe_globals(_ALLOWED):
            yield
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{key}: refused, {_refusal(error)}; {_TRUST}") from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def check_whole(path: str, key: str) -> None:
    """Refuse a local checkpoint that is cut short or differs from its checksums: about a second a GB.

    torch writes checksums and never looks at them.

    Raises:
        DamagedCheckpointError: It is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{key}: {path} is damaged ({error}); take another checkpoint") from error
    if broken is not None:
        raise DamagedCheckpointError(f"{key}: {path} is damaged (checksum of {broken}); take another checkpoint")


def check_checkpoint(path: str, key: str) -> None:
    """Refuse a checkpoint that is damaged, or whose loading would execute something, before anything is touched.

    Of an address only the kind of file is known yet. Weights are mapped, not read, except by the checksums. The load
    itself runs under :func:`restricted_loading` and :func:`check_recorded` again: changing the file meanwhile gains
    nothing.

    Raises:
        DamagedCheckpointError: It is cut short, differs from its checksums, or is no checkpoint.
        ConfigError: It is refused; the message names what it holds.
    """
    if Path(path).is_dir():
        raise ConfigError(f"{key}: {path} is a folder; sharded checkpoints are unpickled without any check: {_TRUST}")
    if is_tar(path) or is_compressed_pt(path):
        raise ConfigError(
            f"{key}: {path} is an archive, which Composer unpacks wherever it says; unpack it, or {_TRUST}"
        )
    if "://" in path:
        return  # it is looked at when it is here
    check_whole(path, key)
    with restricted_loading(f"{key}: {path}", trust=False):
        try:
            held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # of many classes
            raise DamagedCheckpointError(f"{key}: {path} is no checkpoint ({first_line(error)[:200]})") from error
    if not isinstance(held, dict) or not isinstance(held.get("state"), dict):
        raise DamagedCheckpointError(f"{key}: {path} is no checkpoint of Composer's: it holds no training state")
    check_recorded(held, f"{key}: {path}")


def check_recorded(checkpoint: dict[str, Any], key: str = "checkpoint.load") -> None:
    """Refuse recorded algorithms that are more than a known class called with plain values.

    Composer evaluates ``algorithms.<repr>`` for those of its own that a model cannot be loaded without.

    Args:
        checkpoint: As ``torch.load`` returns it; what ``Trainer(load_ignore_keys=…)`` calls before it uses anything.
        key: For the error.

    Raises:
        ConfigError: An unknown name, or a ``repr`` that is an expression.
    """
    recorded = checkpoint["state"].get("algorithms", [])
    known = {*composer.algorithms.__all__, *(technique_class(name).__name__ for name in technique_names())}
    for name, state in recorded.items() if isinstance(recorded, dict) else recorded:
        if type(name) is not str or name not in known:
            raise ConfigError(f"{key}: refused, it records an algorithm {name!r:.80}, which is unknown here; {_TRUST}")
        spelled = state.get("repr", f"{name}()") if isinstance(state, dict) else state
        is_object = isinstance(spelled, str) and re.fullmatch(r"<[\w.]+ object at 0x[0-9a-f]+>", spelled)
        if not is_object and not _is_plain_call(spelled, name):
            raise ConfigError(
                f"{key}: refused, it records {name} as {spelled!r:.80}, which Composer would evaluate; {_TRUST}"
            )


def _is_plain_call(text: Any, name: str) -> bool:
    """Whether ``text`` is ``name(…)`` with literals for arguments."""
    if type(text) is not str or len(text) > 10_000:
        return False
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != name:
            return False
        for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
            ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _refusal(error: pickle.UnpicklingError) -> str:
    found = re.search(r"(?i)unsupported global:? (?:GLOBAL )?([\w.]+)", str(error))
    if found:
        return f"loading it would import {found[1]}, which no checkpoint needs"
    reason = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)
    return f"it holds more than weights and plain values ({reason.splitlines()[0][:200]})"
