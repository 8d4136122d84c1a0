"""Read checkpoints without executing anything in them, and refuse others with a one-line error.

Composer unpickles a checkpoint with ``weights_only=False``, evaluates the recorded ``repr`` of its own algorithms as
Python, reads the index of a sharded checkpoint with pickle, strips a leading underscore from any key, and sets unknown
keys on its State. Each of these can execute code of the file's author. Here the file is read by a restricted unpickler
(:mod:`.unpickling`), and only known contents are passed on: Composer receives a new dict with the keys below, with
values of the types and sizes that the run has, and with algorithms' entries made from the run's own algorithms.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import composer.algorithms
import numpy as np
import torch
from composer.core import Algorithm, Callback, State
from composer.trainer import trainer as composer_trainer
from composer.utils import checkpoint as composer_checkpoint
from composer.utils import dist
from composer.utils.compression import is_compressed_pt
from composer.utils.file_helpers import is_tar
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from composer_speedups.core.catalogue import describe
from composer_speedups.core.errors import ConfigError, UserError, first_line
from composer_speedups.core.technique import Technique, resume_error, techniques_of
from composer_speedups.core.temporary_attribute import temporary_attribute
from composer_speedups.train.checkpoints.saver import FILE_NAME
from composer_speedups.train.checkpoints.structure import MalformedError, conforming, like
from composer_speedups.train.checkpoints.unpickling import Words, check_archive, reason_of, restricted_unpickling

__all__ = [
    "DamagedCheckpointError",
    "UnknownAlgorithmError",
    "admit",
    "check_checkpoint",
    "check_contents",
    "check_whole",
    "restricted_loading",
]

_COUNT = Annotated[int, range(2**62)]
# a resumed run iterates over each earlier epoch, to draw the same random numbers
_EPOCHS = Annotated[int, range(10**5)]
_SPAN = datetime.timedelta
_COUNTS = (
    "iteration epoch batch sample token epoch_in_iteration token_in_iteration "
    "batch_in_epoch sample_in_epoch token_in_epoch"
).split()
_SPANS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
_WITHIN = {"epoch": "batch", "batch_in_epoch": "batch", "sample_in_epoch": "sample", "token_in_epoch": "token"}
_WEIGHTS = {"model": dict[str, Tensor]}
# State of the run's objects, by class name; checked against the objects themselves.
_TRAINING = {
    "optimizers": dict[str, object],
    "schedulers": dict[str, object],
    "callbacks": dict[str, object],
    "scaler": dict[str, object],
    "algorithms": list[tuple[str, dict[str, object]]],
    "timestamp": {"Timestamp": {**dict.fromkeys(_COUNTS, _COUNT), "epoch": _EPOCHS, **dict.fromkeys(_SPANS, _SPAN)}},
    "rank_zero_seed": Annotated[int, range(2**32 - 2**16)],  # each rank appends its number
    "dataset_state": {"train": dict[str, Any] | None, "eval": dict[str, Any]},
}
# Written by Composer and not needed: it overwrites the name, ignores the next two, and metrics start from zero.
_LEFT_OUT = ("run_name", "integrations", "metadata", "train_metrics", "eval_metrics")
_WORD = Annotated[int, range(2**32)]
_PLACE = Annotated[int, range(625)]  # NumPy does not check this index
_GENERATORS = {
    "python": tuple[int, tuple[_WORD, ...], float | None],
    "numpy": tuple[str, tuple[_WORD, ...], _PLACE, Annotated[int, range(2)], float],
    "torch": Tensor,
}
_TRUST = "if you trust its author, set checkpoint.trust_checkpoint=true"
_ANOTHER = "use another checkpoint"
_WEIGHTS_ONLY = "checkpoint.weights_only=true loads its weights only"


class DamagedCheckpointError(ConfigError):
    """A file is not a complete checkpoint: truncated, with a flipped bit, or not written by Composer."""


class UnknownAlgorithmError(ValueError):
    """A checkpoint names an unknown algorithm, or one that Composer would rebuild by evaluating text of the
    checkpoint."""


@contextlib.contextmanager
def restricted_loading(key: str, *, trust: bool) -> Iterator[None]:
    """Make a Trainer that is built inside the block load its checkpoint as this module does, with one-line errors.

    Args:
        key: The config key that names the checkpoint, for errors.
        trust: Load it as Composer does; only the errors are changed.

    Raises:
        ConfigError: It cannot be loaded, does not fit the run, or contains something that would be executed.
    """
    load = functools.partial(_load, composer_checkpoint.load_checkpoint, key, trust)
    open_store = functools.partial(_open_store, composer_trainer.maybe_create_object_store_from_uri, key)
    with (
        temporary_attribute(composer_checkpoint, "load_checkpoint", load),
        temporary_attribute(composer_trainer, "maybe_create_object_store_from_uri", open_store),
        contextlib.nullcontext() if trust else restricted_unpickling(),
    ):
        yield


def check_whole(path: str, key: str, *, trust: bool = True) -> None:
    """Refuse a local checkpoint that is truncated or does not match its checksums. Takes about a second per GB.

    torch writes checksums but does not check them.

    Args:
        path: Path of the file.
        key: The config key that names it, for errors.
        trust: Also read an archive that unpacks to more than its own size.

    Raises:
        DamagedCheckpointError: It is damaged.
        ConfigError: It is refused, without ``trust``.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if not trust:
                check_archive(archive)
            broken = archive.testzip()
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{key}: {path}: refused, {reason_of(error)}; {_TRUST}") from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{key}: {path} is damaged ({error}); {_ANOTHER}") from error
    if broken is not None:
        raise DamagedCheckpointError(f"{key}: {path} is damaged (checksum of {broken}); {_ANOTHER}")


def check_checkpoint(path: str, key: str, *, weights_only: bool = False) -> None:
    """Refuse a checkpoint that is damaged, malformed, or would execute something when loaded, before anything is
    changed.

    For an address, only the kind of file can be checked here; whether sizes fit is checked when the run loads it.
    Weights are memory-mapped and read only for the checksums. Loading repeats all checks, so changing the file in
    between does not help an attacker.

    Args:
        path: Path or address of the file.
        key: The config key that names it, for errors.
        weights_only: Whether only its weights will be loaded.

    Raises:
        DamagedCheckpointError: It is truncated, does not match its checksums or its name, or is not a checkpoint.
        ConfigError: It is refused; the message names the reason.
    """
    remote = "://" in path
    if Path(path).is_dir() or (remote and not (path.endswith(".pt") or is_tar(path) or is_compressed_pt(path))):
        kind = "is not a file that ends in .pt" if remote else "is a folder"
        raise ConfigError(f"{key}: {path} {kind}; sharded checkpoints are unpickled without checks: {_TRUST}")
    if is_tar(path) or is_compressed_pt(path):
        raise ConfigError(
            f"{key}: {path} is an archive, which Composer unpacks to any path in it; unpack it yourself, or {_TRUST}"
        )
    if remote:
        return  # checked after the download
    check_whole(path, key, trust=False)
    with restricted_unpickling(), warnings.catch_warnings():
        # of a tensor type that is refused below
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
        try:
            held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{key}: {path}: refused, {reason_of(error)}; {_TRUST}") from error
        except Exception as error:  # of various classes
            raise DamagedCheckpointError(f"{key}: {path} is not a checkpoint ({first_line(error)[:200]})") from error
    try:
        kept = check_contents(held, weights_only=weights_only)
    except UnknownAlgorithmError as error:
        raise ConfigError(f"{key}: {path}: refused, {error}; {_TRUST}") from error
    except MalformedError as error:
        raise DamagedCheckpointError(f"{key}: {path} is malformed: {error}; {_fix(error)}") from error
    if not weights_only:
        _check_name(path, kept["state"]["timestamp"]["Timestamp"], key)


def _check_name(path: str, time: dict[str, Any], key: str) -> None:
    """Check the name, by which the newest checkpoint is found and old ones are deleted. A link's target is checked
    too."""
    for name in (Path(path).name, Path(path).resolve().name):
        said = FILE_NAME.fullmatch(name)
        if said and (int(said[1]), int(said[2])) != (time["epoch"], time["batch"]):
            raise DamagedCheckpointError(
                f"{key}: {path} does not match its name: it was written in epoch {time['epoch']} after batch "
                f"{time['batch']}; rename it, or {_ANOTHER}"
            )


def _load(load: Callable[..., Any], key: str, trust: bool, path: str, state: State, *args: Any, **settings: Any) -> Any:
    """Composer's ``load_checkpoint``, applied to what :func:`admit` keeps."""
    if not trust:
        if state.fsdp_sharded_state_dict_enabled:
            raise ConfigError(f"{key}: {path}: refused, sharded checkpoints are unpickled without checks; {_TRUST}")
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
    except Exception as error:  # from the file system, an object store, torch or Composer
        raise ConfigError(f"{key}: {path} cannot be loaded ({first_line(error)[:300]}); {_ANOTHER}") from error


def _open_store(open_store: Callable[[str], Any], key: str, uri: str) -> Any:
    try:
        return open_store(uri)
    except Exception as error:  # a missing package, account or bucket
        raise ConfigError(
            f"{key}: {uri} cannot be reached ({first_line(error)[:300]}); download it, and name the local file"
        ) from error


def _fix(error: MalformedError) -> str:
    if error.where == "state/model" or error.where.startswith("state/model/"):
        keys = "model.name, model.size, model.task, data.vocab_size"
        return f"use the model and the tokenizer that it was trained with ({keys})"
    return _ANOTHER if error.where == "state" else f"{_ANOTHER}, or {_WEIGHTS_ONLY}"


def check_contents(held: Any, *, weights_only: bool) -> dict[str, Any]:
    """Extract the usable contents of a checkpoint, with all checks that do not need the run.

    Args:
        held: The contents as read.
        weights_only: Extract only the weights and what they were trained with.

    Returns:
        A new dict with ``state`` and, unless ``weights_only``, ``rng``.

    Raises:
        MalformedError: Something is missing, or has another type or size.
        UnknownAlgorithmError: See there.
    """
    # other classes may have attributes in place of methods
    if type(held) is not dict or type(held.get("state")) is not dict:
        raise MalformedError("state", "is missing: it is not a checkpoint of Composer")
    state = held["state"]
    wanted = _WEIGHTS if weights_only else {**_WEIGHTS, **_TRAINING}
    if missing := [name for name in wanted if name not in state]:
        raise MalformedError(f"state/{missing[0]}", "is missing")
    kept = {name: conforming(state[name], hint, f"state/{name}") for name, hint in wanted.items()}
    if "algorithms" in state:
        recorded = conforming(state["algorithms"], _TRAINING["algorithms"], "state/algorithms")
        _check_known(name for name, _ in recorded)
    if weights_only:
        return {"state": kept}
    time = kept["timestamp"]["Timestamp"]
    for part, whole in _WITHIN.items():
        if time[part] > time[whole]:
            raise MalformedError(f"state/timestamp/Timestamp/{part}", f"is {time[part]}, and {whole} is {time[whole]}")
    return {"state": kept, "rng": _generators(held.get("rng"))}


def admit(held: dict[str, Any], state: State, *, weights_only: bool) -> None:
    """Reduce a checkpoint to what Composer may load into ``state``.

    Args:
        held: The contents as read; changed in place, as Composer's ``load_ignore_keys`` is allowed to do.
        state: The run's state, after its algorithms changed the model.
        weights_only: Keep only the weights.

    Raises:
        ConfigError: It was written with other techniques, or while other ranks read a stream.
        MalformedError: It does not fit the run; the message says where.
        UnknownAlgorithmError: See there.
    """
    elsewhere = state.load_monolith_rank0_only and dist.get_global_rank() != 0  # only rank 0 has the tensors
    contents = held if not elsewhere else {**held, "state": {**held["state"], "model": {}, "optimizers": {}}}
    kept = check_contents(contents, weights_only=weights_only)
    if dist.get_global_rank() == 0:
        _name_unknown_keys(held)
    mine: dict[str, Any] = kept["state"]
    if not weights_only:
        _check_ranks(len(kept["rng"]), state)
        mine["algorithms"] = _of_algorithms(mine["algorithms"], state.algorithms)
    if elsewhere:
        mine.update(model=None, optimizers=None)
    # FSDP1's flat parameters have other names and shapes; torch checks them itself
    elif state.fsdp_config_version != 1:
        _check_weights(mine["model"], state)
        if not weights_only:
            mine["optimizers"] = _of_optimizers(mine["optimizers"], state)
    if not weights_only:
        mine["schedulers"] = _by_class("schedulers", mine["schedulers"], state.schedulers)
        scalers = [state.scaler] if state.scaler is not None and state.scaler.state_dict() else []
        mine["scaler"] = _by_class("scaler", mine["scaler"], scalers) or {type(state.scaler).__qualname__: {}}
        mine["callbacks"] = _of_callbacks(mine["callbacks"], state.callbacks)
    held.clear()
    held.update(kept)


def _check_ranks(before: int, state: State) -> None:
    """Refuse to continue a stream on another number of ranks, which would skip some rows and repeat others."""
    now, rows = dist.get_world_size(), getattr(state.train_dataloader, "dataset", None)
    if before != now and isinstance(rows, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"checkpoint.load: it was written while {before} rank{'s' * (before > 1)} read the stream, and {now} would "
            f"continue with other rows; start with composer -n {before}, or {_WEIGHTS_ONLY}"
        )


def _name_unknown_keys(held: dict[str, Any]) -> None:
    known = {*_WEIGHTS, *_TRAINING, *_LEFT_OUT}
    unknown = [f"state/{name}" for name in held["state"] if name not in known]
    unknown += [str(name) for name in held if name not in ("state", "rng")]
    if unknown:
        warnings.warn(
            f"checkpoint.load: unknown keys of the checkpoint are ignored: {', '.join(unknown)[:300]}",
            UserWarning,
            stacklevel=2,
        )


def _check_known(recorded: Any) -> None:
    """Refuse algorithms that Composer would rebuild from text in the checkpoint."""
    ours = {technique.class_name for technique in describe()}
    for name in recorded:
        if name in ours:
            continue
        if name not in composer.algorithms.__all__:
            raise UnknownAlgorithmError(f"it records an unknown algorithm {name!r:.80}")
        if getattr(composer.algorithms, name).required_on_load():
            raise UnknownAlgorithmError(
                f"it was trained with {name}, which changes the model and which Composer would make by evaluating text "
                "in the checkpoint"
            )


def _of_algorithms(recorded: list[tuple[str, dict[str, Any]]], algorithms: list[Algorithm]) -> dict[str, Any]:
    """The algorithms as a dict, in which Composer looks up the run's own ones; it would evaluate the entries of a
    list."""
    states = dict(recorded)
    ours = {technique.class_name for technique in describe()}
    before = sorted(
        conforming(each.get("repr"), str, f"state/algorithms/{name}/repr") for name, each in recorded if name in ours
    )
    if before != (now := sorted(map(repr, techniques_of(algorithms)))):
        raise resume_error(before, now)
    return {
        type(each).__qualname__: conforming(
            states[type(each).__qualname__], each.checkpoint_fields, f"state/algorithms/{type(each).__qualname__}"
        )
        if isinstance(each, Technique)
        else each.state_dict()
        for each in algorithms
    }


def _of_callbacks(recorded: dict[str, Any], callbacks: list[Callback]) -> dict[str, Any]:
    """The state of callbacks that declare ``checkpoint_fields``: each field with its type, as in ``Technique``.

    Other callbacks receive their own state, which changes nothing.
    """
    states = {}
    for callback in callbacks:
        name, fields = type(callback).__qualname__, getattr(callback, "checkpoint_fields", None)
        if fields is None:
            states[name] = callback.state_dict()
        elif name in recorded:  # otherwise Composer warns that it is not restored
            states[name] = conforming(recorded[name], fields, f"state/callbacks/{name}")
    return states


def _by_class(
    what: str, recorded: dict[str, Any], own: Any, state_of: Callable[[Any], Any] = lambda each: each.state_dict()
) -> dict[str, Any]:
    states = {}
    for each in own:
        name = type(each).__qualname__
        if name not in recorded:
            raise MalformedError(f"state/{what}", f"has no {name}, which this run has")
        states[name] = like(recorded[name], state_of(each), f"state/{what}/{name}")
    return states


def _check_weights(recorded: dict[str, Tensor], state: State) -> None:
    own = get_model_state_dict(state.model)
    missing, more = ([n for n in one if n not in other] for one, other in ((own, recorded), (recorded, own)))
    if missing or more:
        lacks = f"has no {missing[0]}" if missing else ""
        has = f"has {more[0]!r:.200}, which this run's model does not have" if more else ""
        raise MalformedError("state/model", " and ".join(filter(None, (lacks, has))))
    for name, tensor in own.items():
        like(recorded[name], tensor, f"state/model/{name}")


def _of_optimizers(recorded: dict[str, Any], state: State) -> dict[str, Any]:
    # for an optimizer without state, torch steps as it does when loading
    own = {type(each).__qualname__: get_optimizer_state_dict(state.model, each) for each in state.optimizers}
    states = _by_class("optimizers", recorded, state.optimizers, lambda each: own[type(each).__qualname__])
    for name, held in states.items():
        for i, (theirs, ours) in enumerate(zip(held["param_groups"], own[name]["param_groups"], strict=True)):
            if set(theirs["params"]) != set(ours["params"]):  # type: ignore[arg-type, index]
                where = f"state/optimizers/{name}/param_groups/{i}/params"
                raise MalformedError(where, "names parameters that differ from this run's")
    return states


def _generators(recorded: Any) -> list[dict[str, Any]]:
    """The random states of each rank, checked by loading them into separate generators."""
    ranks = []
    for i, rank in enumerate(conforming(recorded, list[dict[str, object]], "rng")):
        where = f"rng/{i}"
        fields = {**_GENERATORS, "cuda": Tensor} if "cuda" in rank else _GENERATORS
        numpy = rank.get("numpy")
        if isinstance(numpy, tuple) and len(numpy) == 5 and isinstance(numpy[1], Words):  # written by Composer itself
            rank["numpy"] = (numpy[0], numpy[1].values, *numpy[2:])
        states = conforming(rank, fields, where)
        for name, attempt in (
            ("python", random.Random().setstate),
            ("numpy", np.random.RandomState().set_state),
            ("torch", torch.Generator().set_state),
        ):
            try:
                attempt(states[name])
            except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
                raise MalformedError(f"{where}/{name}", f"is not a state of that generator ({error})") from error
        if "cuda" in states and states["cuda"].dtype != torch.uint8:
            raise MalformedError(f"{where}/cuda", "is not a state of that generator")
        ranks.append(states)
    if not ranks:
        raise MalformedError("rng", "is empty")
    return ranks
