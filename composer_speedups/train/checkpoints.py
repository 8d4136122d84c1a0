"""Write checkpoints atomically, find them, and read them without executing anything in them, unlike Composer, which
unpickles any object and evaluates the recorded ``repr`` of algorithms."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import composer.algorithms
import torch
from composer.callbacks import CheckpointSaver
from composer.core import Event, State
from composer.loggers import Logger
from composer.trainer import trainer as composer_trainer
from composer.utils import checkpoint as composer_checkpoint
from composer.utils import dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from composer_speedups.callbacks.checkpoints import checkpoint_allowed, last_checkpoint
from composer_speedups.core.engaging import refuse_other_techniques, techniques_of
from composer_speedups.core.errors import ConfigError, Interrupted, Refusal, RunFailedError, causes_of, first_line
from composer_speedups.core.files import NO_SPACE, publish, remove_unfinished
from composer_speedups.core.reversible import temporary_attribute
from composer_speedups.train.fit import StopSignals

_FILE_NAME = re.compile(r"ep(\d+)-ba(\d+)-rank0\.pt")  # named as by Composer
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

    def load(path: str, state: State, *args: Any, load_weights_only: bool = False, **settings: Any) -> Any:
        if trust:
            return composer_load(path, state, *args, load_weights_only=load_weights_only, **settings)
        settings["ignore_keys"] = functools.partial(_keep_own, state=state, weights_only=load_weights_only)
        with temporary_attribute(composer_checkpoint, "_torch_load_with_validation", _unpickle):
            return composer_load(path, state, *args, load_weights_only=load_weights_only, **settings)

    in_one_line, store = _one_line("checkpoint.load"), "maybe_create_object_store_from_uri"
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
    """Read a local file with its tensors mapped to memory; with ``trust``, return {} if it holds other objects."""
    with _one_line(f"{key}: {path}", DamagedCheckpointError):
        with zipfile.ZipFile(path) as archive:  # torch does not verify the checksums
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
    """Reduce a checkpoint, in place, to what Composer may load into ``state``; refuse one of another model."""
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
    if (given := kept["model"]) is None:  # only rank 0 may have the tensors
        return
    run: dict[str, Any] = get_model_state_dict(state.model)
    for name in {**run, **given}:  # Composer would skip those of other names
        theirs, ours = (tuple(weights[name].shape) if name in weights else "missing" for weights in (given, run))
        if theirs != ours:
            raise ConfigError(
                f"checkpoint.load does not fit this run: {name} is {theirs} in it and {ours} in the model; use the "
                "model and the tokenizer that it was trained with (model.name, model.size, model.task, data.vocab_size)"
            )


class WholeCheckpointSaver(CheckpointSaver):
    """Saves checkpoints under a temporary name until they are on the disk; a kill of Composer leaves
    a partial file in place."""

    def __init__(self, folder: Path, interval: str, keep: int, stop: StopSignals) -> None:
        super().__init__(
            folder=str(folder),
            remote_file_name=None,
            latest_remote_file_name=None,
            save_interval=interval,
            overwrite=True,  # the folder belongs to this run
            num_checkpoints_to_keep=keep,
        )
        self.stop = stop
        self._due = False  # at the end of the epoch

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        if dist.get_global_rank() == 0:
            self._remove_older()  # an earlier process may have been killed before it did
        self.stop.phase = "after the batch"

    def fit_end(self, state: State, logger: Logger) -> None:
        super().fit_end(state, logger)
        self.stop.phase = "never"

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch_in_epoch.value == state.dataloader_len:
            # The epoch ends next, from where a resumed run starts more cleanly than from after the last batch.
            self._due = self.save_interval(state, Event.BATCH_CHECKPOINT)
        else:
            super().batch_checkpoint(state, logger)
        if (signum := self.stop.signal_on_any_rank(state.device)) is None:
            return
        unsaved = self.last_checkpoint_batch != state.timestamp.batch
        if unsaved and checkpoint_allowed(self, state, Event.BATCH_CHECKPOINT):
            self._save_checkpoint(state, logger)
        saved = self.last_checkpoint_batch == state.timestamp.batch
        raise Interrupted(signum, state.timestamp.batch.value, None if saved else last_checkpoint(state) or "the start")

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        if self._due and self.last_checkpoint_batch != state.timestamp.batch:
            self._save_checkpoint(state, logger)
        self._due = False
        super().epoch_checkpoint(state, logger)

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        self.last_checkpoint_batch = state.timestamp.batch
        path = Path(self.filename.format(state))
        partial = path.with_name(f".unfinished-{path.name}")
        try:
            composer_checkpoint.save_checkpoint(state, str(partial))
            if dist.get_global_rank() == 0:
                publish(partial, path)
                self._point_at(path, state)
        except Exception as error:
            remove_unfinished(path.parent)
            cause = next((cause for cause in causes_of(error) if isinstance(cause, OSError)), None)
            if cause is None:
                raise
            older = next(iter(checkpoints_in(path.parent)), "the start")
            fix = "free some space" if cause.errno in NO_SPACE else "see to the folder"
            reason = f"{path} could not be written ({cause.strerror or cause}); {fix}"
            raise RunFailedError(f"checkpoint: {reason}; the same command resumes from {older}") from error
        if dist.get_global_rank() == 0:
            self.saved_checkpoints.append(str(path))
            self._remove_older()

    def _point_at(self, path: Path, state: State) -> None:
        assert self.latest_filename is not None
        link = Path(self.latest_filename.format(state))
        new = link.with_name(f".unfinished-{link.name}")
        new.unlink(missing_ok=True)
        new.symlink_to(path.name)
        os.replace(new, link)

    def _remove_older(self) -> None:
        if self.num_checkpoints_to_keep >= 0:
            for path in checkpoints_in(Path(self.folder))[max(self.num_checkpoints_to_keep, 1) :]:
                path.unlink(missing_ok=True)


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints sorted by batches, the newest first. Partial files are not included."""
    numbers = {path: match for path in folder.glob("*.pt") if (match := _FILE_NAME.fullmatch(path.name))}
    return sorted(numbers, key=lambda path: (int(numbers[path][2]), int(numbers[path][1])), reverse=True)
