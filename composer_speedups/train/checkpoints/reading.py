"""Read checkpoints without executing anything in them, and refuse others with a one-line error.

Composer unpickles any object, evaluates the recorded ``repr`` of its algorithms, and sets unknown keys of its State.
Here torch's restricted unpickler reads the file, and Composer receives the keys below and the run's own algorithms.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import composer.algorithms
import torch
from composer.core import State
from composer.trainer import trainer as composer_trainer
from composer.utils import checkpoint as composer_checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from composer_speedups.core.engaging import refuse_other_techniques, techniques_of
from composer_speedups.core.errors import ConfigError, Refusal, first_line
from composer_speedups.core.reversible import temporary_attribute

_KEPT = "model optimizers schedulers algorithms callbacks scaler timestamp rank_zero_seed dataset_state".split()


class RandomWords(list[int]):
    """NumPy's random state, in place of its array, dtype and unpickling function, which crafted files can crash."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self += struct.unpack("<624I", state[-1]) if type(state[-1]) is bytes else ()


_NUMPY = ("numpy.ndarray", "numpy.dtype", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_ALLOWED: list[Any] = [timedelta, torch.torch_version.TorchVersion, *((RandomWords, name) for name in _NUMPY)]


class DamagedCheckpointError(ConfigError):
    """A file is not a complete checkpoint: truncated, with a flipped bit, or not written by Composer."""


@contextlib.contextmanager
def restricted_loading(*, trust: bool) -> Iterator[None]:
    """Make a Trainer built inside the block load its checkpoint as this module does, or with ``trust`` as Composer."""
    composer_load: Any = composer_checkpoint.load_checkpoint
    store = "maybe_create_object_store_from_uri"

    def load(path: str, state: State, *args: Any, load_weights_only: bool = False, **settings: Any) -> Any:
        if trust:
            return composer_load(path, state, *args, load_weights_only=load_weights_only, **settings)
        if state.fsdp_sharded_state_dict_enabled:
            raise pickle.UnpicklingError("sharded checkpoints are unpickled without checks")
        settings["ignore_keys"] = functools.partial(_keep_own, state=state, weights_only=load_weights_only)
        with temporary_attribute(composer_checkpoint, "_torch_load_with_validation", _unpickle):
            return composer_load(path, state, *args, load_weights_only=load_weights_only, **settings)

    in_one_line = _one_line("checkpoint.load")
    with (
        temporary_attribute(composer_checkpoint, "load_checkpoint", in_one_line(load)),
        temporary_attribute(composer_trainer, store, in_one_line(getattr(composer_trainer, store))),
    ):
        yield


@contextlib.contextmanager
def _one_line(name: str, kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Raise errors as a ConfigError that begins with ``name``, of class ``kind`` if the file is damaged."""
    try:
        yield
    except Refusal:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)  # torch's, without its advice
        if imported := re.search(r"(?i)unsupported global:? (?:GLOBAL )?([\w.]+)", reason):
            reason = f"it would import {imported[1]}, which checkpoints do not need"
        reason = f"{reason.splitlines()[0][:200]}; if you trust its author, set checkpoint.trust_checkpoint=true"
        raise ConfigError(f"{name}: refused, {reason}") from error
    except Exception as error:  # from the file system, an object store, zipfile, torch or Composer
        kind = ConfigError if isinstance(error, (MemoryError, torch.OutOfMemoryError)) else kind
        raise kind(f"{name} cannot be loaded ({first_line(error)[:300]}); use another checkpoint") from error


def read_checkpoint(path: str, key: str, *, trust: bool = False) -> dict[str, Any]:
    """Read a local file, which ``key`` names in errors, with its tensors mapped to memory; with ``trust``, return {} if
    it holds other objects. torch does not verify the checksums; this function does, in about a second per GB."""
    with _one_line(f"{key}: {path}", DamagedCheckpointError):
        with zipfile.ZipFile(path) as archive:
            if broken := archive.testzip():
                raise zipfile.BadZipFile(f"damaged: checksum of {broken}")
        with contextlib.suppress(*[pickle.UnpicklingError] * trust):
            held: dict[str, Any] = _unpickle(path, mmap=True)
            if not isinstance(held["state"]["model"], dict):
                raise TypeError("it has no weights")
            return held
        return {}


def _unpickle(path: Any, **settings: Any) -> Any:
    with torch.serialization.safe_globals(_ALLOWED):
        return torch.load(path, weights_only=True, **settings)


def _keep_own(held: dict[str, Any], state: State, *, weights_only: bool) -> None:
    """Reduce a checkpoint, in place, to what Composer may load into ``state``, which its algorithms have changed.
    One that was written with other techniques, or for another model, is refused."""
    recorded = dict(held["state"].get("algorithms", ()))
    for name in recorded:  # Composer would build one that changes the model by evaluating the file's text
        if getattr(getattr(composer.algorithms, name, None), "required_on_load", bool)():
            raise pickle.UnpicklingError(f"it was trained with {name}, which changes the model")
    kept = {name: held["state"][name] for name in (_KEPT[:1] if weights_only else _KEPT)}
    if not weights_only:
        host = kept["callbacks"].get("Host", {"techniques": []})
        refuse_other_techniques(host["techniques"], techniques_of(state.algorithms))
        own = {type(algorithm).__qualname__ for algorithm in state.algorithms}
        kept["algorithms"] = {name: recorded[name] for name in own}  # Composer evaluates the entries of a list
        # callbacks may be added when a run is resumed
        kept["callbacks"] = {type(c).__qualname__: c.state_dict() for c in state.callbacks} | kept["callbacks"]
    for name in held.keys() - ({"state"} if weights_only else {"state", "rng"}):
        del held[name]
    held["state"] = kept
    # FSDP1's flat parameters have other names and shapes; and only rank 0 may have the tensors
    if (given := kept["model"]) is None or state.fsdp_config_version == 1:
        return
    run: dict[str, Any] = get_model_state_dict(state.model)
    for name in {**run, **given}:  # Composer would skip those of other names
        theirs, ours = (tuple(weights[name].shape) if name in weights else "missing" for weights in (given, run))
        if theirs != ours:
            raise ConfigError(
                f"checkpoint.load does not fit this run: {name} is {theirs} in it and {ours} in the model; use the "
                "model and the tokenizer that it was trained with (model.name, model.size, model.task, data.vocab_size)"
            )
