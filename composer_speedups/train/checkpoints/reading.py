"""Checkpoints of others: read without executing anything that they hold, and refused in one line.

Composer unpickles a checkpoint with ``weights_only=False``, evaluates the recorded ``repr`` of its own algorithms as
Python, and reads the index of a sharded one with pickle. Each runs what the file's author wished. Here the file goes
through a restricted unpickler (:mod:`.unpickling`), and Composer gets a new dict of known keys (:mod:`.contents`).
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.trainer import trainer as composer_trainer
from composer.utils import checkpoint as composer_checkpoint
from composer.utils.compression import is_compressed_pt
from composer.utils.file_helpers import is_tar

from composer_speedups.core.errors import ConfigError, UserError, first_line
from composer_speedups.core.replaced import replaced
from composer_speedups.train.checkpoints.contents import UnknownAlgorithmError, admit, check_contents
from composer_speedups.train.checkpoints.structure import MalformedError
from composer_speedups.train.checkpoints.unpickling import reason_of, restricted_unpickling

__all__ = ["FILE_NAME", "DamagedCheckpointError", "check_checkpoint", "check_whole", "restricted_loading"]

FILE_NAME = re.compile(r"ep(\d+)-ba(\d+)-rank0\.pt")  # as Composer names them
_TRUST = "only if you trust whoever wrote it, set checkpoint.trust_checkpoint=true"
_ANOTHER = "take another checkpoint"
_WEIGHTS = "checkpoint.weights_only=true takes its weights alone"


class DamagedCheckpointError(ConfigError):
    """A file that is no whole checkpoint: cut short, with a bit that flipped, or not made as Composer makes them."""


@contextlib.contextmanager
def restricted_loading(key: str, *, trust: bool) -> Iterator[None]:
    """A Trainer built inside loads a checkpoint as this module reads it, and says in one line why it cannot.

    Args:
        key: The config key that names the checkpoint, for the error.
        trust: Load it as Composer does; only the errors are in one line.

    Raises:
        ConfigError: It cannot be loaded, does not fit the run, or holds what would be executed, which is named.
    """
    load = functools.partial(_load, composer_checkpoint.load_checkpoint, key, trust)
    open_store = functools.partial(_open_store, composer_trainer.maybe_create_object_store_from_uri, key)
    with (
        replaced(composer_checkpoint, "load_checkpoint", load),
        replaced(composer_trainer, "maybe_create_object_store_from_uri", open_store),
        contextlib.nullcontext() if trust else restricted_unpickling(),
    ):
        yield


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
        raise DamagedCheckpointError(f"{key}: {path} is damaged ({error}); {_ANOTHER}") from error
    if broken is not None:
        raise DamagedCheckpointError(f"{key}: {path} is damaged (checksum of {broken}); {_ANOTHER}")


def check_checkpoint(path: str, key: str, *, weights_only: bool = False) -> None:
    """Refuse a checkpoint that is damaged, malformed, or whose loading would execute something, before anything is
    touched.

    Of an address only the kind of file is known yet, and only the run knows whether the sizes fit. Weights are mapped,
    not read, except by the checksums. The load itself looks at everything again: changing the file meanwhile gains
    nothing.

    Args:
        path: Of a file, or an address.
        key: The config key that names it, for the error.
        weights_only: Whether nothing but its weights is going to be loaded.

    Raises:
        DamagedCheckpointError: It is cut short, differs from its checksums, is no checkpoint, or not the one that its
            name says.
        ConfigError: It is refused; the message names what it holds.
    """
    remote = "://" in path
    if Path(path).is_dir() or (remote and not (path.endswith(".pt") or is_tar(path) or is_compressed_pt(path))):
        kind = "names no file that ends in .pt" if remote else "is a folder"
        raise ConfigError(f"{key}: {path} {kind}; sharded checkpoints are unpickled without any check: {_TRUST}")
    if is_tar(path) or is_compressed_pt(path):
        raise ConfigError(
            f"{key}: {path} is an archive, which Composer unpacks wherever it says; unpack it, or {_TRUST}"
        )
    if remote:
        return  # it is looked at when it is here
    check_whole(path, key)
    with restricted_unpickling(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)  # of a tensor that is refused below
        try:
            held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{key}: {path}: refused, {reason_of(error)}; {_TRUST}") from error
        except Exception as error:  # of many classes
            raise DamagedCheckpointError(f"{key}: {path} is no checkpoint ({first_line(error)[:200]})") from error
    try:
        kept = check_contents(held, weights_only=weights_only)
    except UnknownAlgorithmError as error:
        raise ConfigError(f"{key}: {path}: refused, {error}; {_TRUST}") from error
    except MalformedError as error:
        raise DamagedCheckpointError(f"{key}: {path} is malformed: {error}; {_fix(error)}") from error
    if not weights_only:
        _check_name(path, kept["state"]["timestamp"]["Timestamp"], key)


def _check_name(path: str, time: dict[str, Any], key: str) -> None:
    """Names say which checkpoint is the newest, and the rest is removed by them; a link's target has a name too."""
    for name in (Path(path).name, Path(path).resolve().name):
        said = FILE_NAME.fullmatch(name)
        if said and (int(said[1]), int(said[2])) != (time["epoch"], time["batch"]):
            raise DamagedCheckpointError(
                f"{key}: {path} is not what its name says: it was written in epoch {time['epoch']} after batch "
                f"{time['batch']}; give it that name, or {_ANOTHER}"
            )


def _load(load: Callable[..., Any], key: str, trust: bool, path: str, state: State, *args: Any, **settings: Any) -> Any:
    """Composer's ``load_checkpoint``, which gets to see what :func:`admit` leaves."""
    if not trust:
        if state.fsdp_sharded_state_dict_enabled:
            raise ConfigError(f"{key}: {path}: refused, sharded checkpoints are unpickled without any check; {_TRUST}")
        weights_only = settings.get("load_weights_only", False)
        settings["ignore_keys"] = functools.partial(admit, state=state, weights_only=weights_only)
    try:
        return load(path, state, *args, **settings)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (pickle.UnpicklingError, UnknownAlgorithmError) as error:
        reason = reason_of(error) if isinstance(error, pickle.UnpicklingError) else error
        raise ConfigError(f"{key}: {path}: refused, {reason}; {_TRUST}") from error
    except MalformedError as error:
        raise ConfigError(f"{key}: {path} does not fit this run: {error}; {_fix(error)}") from error
    except Exception as error:  # of the file system, an object store, torch or Composer
        raise ConfigError(f"{key}: {path} cannot be loaded ({first_line(error)[:300]}); {_ANOTHER}") from error


def _open_store(open_store: Callable[[str], Any], key: str, uri: str) -> Any:
    try:
        return open_store(uri)
    except Exception as error:  # of a package that is missing, an account or a bucket
        raise ConfigError(
            f"{key}: {uri} cannot be reached ({first_line(error)[:300]}); download it, and give the file"
        ) from error


def _fix(error: MalformedError) -> str:
    if error.where == "state/model" or error.where.startswith("state/model/"):
        keys = "model.name, model.size, model.task, data.vocab_size"
        return f"give the model and the tokenizer that it was trained with ({keys})"
    return _ANOTHER if error.where == "state" else f"{_ANOTHER}, or {_WEIGHTS}"
