"""Read checkpoints without executing anything in them, and refuse others with a one-line error.

Composer unpickles a checkpoint with ``weights_only=False``, evaluates the recorded ``repr`` of its own algorithms,
unpickles the index of a sharded checkpoint, and sets unknown keys on its State. Each of these can execute code of the
file's author. Here torch's restricted unpickler reads the file, and Composer receives a new dict with the keys below
only, with the structure of the run's own state and the states of the run's own algorithms.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NotRequired

import composer.algorithms
import torch
from composer.core import State
from composer.trainer import trainer as composer_trainer
from composer.utils import checkpoint as composer_checkpoint
from composer.utils import dist
from composer.utils.compression import is_compressed_pt
from composer.utils.file_helpers import is_tar
from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError, with_config
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from typing_extensions import TypedDict

from composer_speedups.core.engaging import refuse_other_techniques, techniques_of
from composer_speedups.core.errors import ConfigError, Refusal, first_line
from composer_speedups.core.host import Host, host_of
from composer_speedups.core.temporary_attribute import temporary_attribute

__all__ = ["DamagedCheckpointError", "check_checkpoint", "keep_loadable", "restricted_loading", "validate"]

MAX_PICKLE_BYTES = 2**26  # of data.pkl, whose largest part in a long run is ThroughputMonitor's 60 bytes per batch
MAX_TUPLE_VALUES = 10_000  # the state of a random generator has 625
_TRUST_FIX = "if you trust its author, set checkpoint.trust_checkpoint=true"
_OTHER_FIX = "use another checkpoint"


class RandomWords(list[int]):
    """Replaces NumPy's array, dtype and unpickling function, which trust the file and can crash.

    The only array in a checkpoint that Composer writes has the words of NumPy's random generator.
    """

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if type(state[-1]) is bytes:  # an array's values; a dtype's state ends with its flags
            self += struct.unpack("<624I", state[-1])


_NUMPY = ("numpy.ndarray", "numpy.dtype", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_ALLOWED: list[Any] = [timedelta, torch.torch_version.TorchVersion, *((RandomWords, name) for name in _NUMPY)]


def _record(fields: dict[str, Any]) -> Any:
    """A pydantic type: a dict with these keys and types; other keys are left out."""
    return with_config(ConfigDict(strict=True, arbitrary_types_allowed=True))(TypedDict("_", fields))  # type: ignore


_Epochs = Annotated[NonNegativeInt, Field(le=10**5)]  # a resumed run iterates over each of them
_Seed = Annotated[NonNegativeInt, Field(lt=2**32 - 2**16)]  # each rank adds its number
_Position = Annotated[NonNegativeInt, Field(le=624)]  # in the words of NumPy's generator, which does not check it
_TIMES = {
    "epoch": _Epochs,
    **dict.fromkeys(("iteration", "batch", "sample", "token"), NonNegativeInt),
    **dict.fromkeys(("epoch_in_iteration", "token_in_iteration"), NonNegativeInt),
    **dict.fromkeys(("batch_in_epoch", "sample_in_epoch", "token_in_epoch"), NonNegativeInt),
    **dict.fromkeys(("total_wct", "iteration_wct", "epoch_wct", "batch_wct"), timedelta),
}
_GENERATORS = {
    "python": tuple[int, tuple[int, ...], float | None],
    "numpy": tuple[str, list[int] | tuple[int, ...], _Position, int, float],
    "torch": Tensor,
    "cuda": NotRequired[Tensor],
}
_ALGORITHMS = list[tuple[str, dict[str, Any]]]
_WEIGHTS = {"model": dict[str, Tensor], "algorithms": NotRequired[_ALGORITHMS]}
_TRAINING = {
    "model": dict[str, Tensor],
    "algorithms": _ALGORITHMS,
    **dict.fromkeys(("optimizers", "schedulers", "callbacks", "scaler"), dict[str, Any]),  # compared with the run's own
    "timestamp": _record({"Timestamp": _record(_TIMES)}),
    "rank_zero_seed": _Seed,
    "dataset_state": _record({"train": dict[str, Any] | None, "eval": dict[str, Any]}),
}
_RANKS = Annotated[list[_record(_GENERATORS)], Field(min_length=1)]  # type: ignore[misc, valid-type]


class DamagedCheckpointError(ConfigError):
    """A file is not a complete checkpoint: truncated, with a flipped bit, or not written by Composer."""


class MalformedError(ValueError):
    """A value in a checkpoint has another type or size than expected; ``path`` are the keys that lead to it."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        super().__init__(f"{path}: {reason}")


@contextlib.contextmanager
def restricted_loading(*, trust: bool) -> Iterator[None]:
    """Make a Trainer that is built inside the block load its checkpoint as this module does, with one-line errors.

    Args:
        trust: Load it as Composer does; only the errors are changed.

    Raises:
        ConfigError: It cannot be loaded, does not fit the run, or contains something that would be executed.
    """
    composer_load = composer_checkpoint.load_checkpoint
    composer_open = composer_trainer.maybe_create_object_store_from_uri

    def load(path: str, state: State, *args: Any, **settings: Any) -> Any:
        weights_only = settings.get("load_weights_only", False)
        with _one_line(f"checkpoint.load: {path}", weights_only):
            if trust:
                return composer_load(path, state, *args, **settings)
            if state.fsdp_sharded_state_dict_enabled:
                raise pickle.UnpicklingError("sharded checkpoints are unpickled without checks")
            settings["ignore_keys"] = functools.partial(keep_loadable, state=state, weights_only=weights_only)
            with temporary_attribute(composer_checkpoint, "_torch_load_with_validation", _read):
                return composer_load(path, state, *args, **settings)

    def open_store(uri: str) -> Any:
        with _one_line(f"checkpoint.load: {uri}"):
            return composer_open(uri)

    with (
        temporary_attribute(composer_checkpoint, "load_checkpoint", load),
        temporary_attribute(composer_trainer, "maybe_create_object_store_from_uri", open_store),
    ):
        yield


@contextlib.contextmanager
def _one_line(name: str, weights_only: bool = False, kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Raise errors as a ConfigError that begins with ``name``; of class ``kind`` if the file is damaged."""
    try:
        yield
    except Refusal:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)  # torch's, without its advice
        if imported := re.search(r"(?i)unsupported global:? (?:GLOBAL )?([\w.]+)", reason):
            reason = f"it would import {imported[1]}, which checkpoints do not need"
        raise ConfigError(f"{name}: refused, {reason.splitlines()[0][:200]}; {_TRUST_FIX}") from error
    except MalformedError as error:
        fix = _OTHER_FIX if weights_only else f"{_OTHER_FIX}, or checkpoint.weights_only=true loads its weights only"
        if error.path.startswith("state/model"):
            keys = "model.name, model.size, model.task, data.vocab_size"
            fix = f"use the model and the tokenizer that it was trained with ({keys})"
        raise kind(f"{name} does not fit this run: {error}; {fix}") from error
    except Exception as error:  # from the file system, an object store, zipfile, torch or Composer
        kind = ConfigError if isinstance(error, (MemoryError, torch.OutOfMemoryError)) else kind
        raise kind(f"{name} cannot be loaded ({first_line(error)[:300]}); {_OTHER_FIX}") from error


def check_checkpoint(path: str, key: str, *, weights_only: bool = False, trust: bool = False) -> None:
    """Refuse a checkpoint that is damaged, malformed, or would execute something when loaded, before any file changes.

    The checksums, which torch writes but does not check, take about a second per GB. For an address, only the kind of
    file can be checked here. Whether sizes fit is checked when the run loads it, which also repeats all other checks.

    Args:
        path: Path or address of the file.
        key: The config key that names it, for errors.
        weights_only: Whether only its weights will be loaded.
        trust: Check only whether a local file is damaged.

    Raises:
        DamagedCheckpointError: It is truncated, does not match its checksums, or is not a checkpoint.
        ConfigError: It is refused; the message names the reason.
    """
    with _one_line(f"{key}: {path}", weights_only, DamagedCheckpointError):
        if not trust:
            if is_tar(path) or is_compressed_pt(path):
                raise pickle.UnpicklingError("Composer unpacks an archive to any path in it; unpack it yourself")
            if Path(path).is_dir() or ("://" in path and not path.endswith(".pt")):
                raise pickle.UnpicklingError("sharded checkpoints are unpickled without checks; name a .pt file")
            if "://" in path:
                return
        with zipfile.ZipFile(path) as archive:
            if not trust:
                _check_sizes(archive)
            if broken := archive.testzip():
                raise zipfile.BadZipFile(f"damaged: checksum of {broken}")
        if not trust:
            _contents(_unpickle(path, mmap=True), weights_only=weights_only)


def _read(path: Any, map_location: str = "cpu") -> Any:
    """Replaces the function with which Composer unpickles a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        _check_sizes(archive)
    return _unpickle(path, map_location=map_location)


def _unpickle(path: Any, **settings: Any) -> Any:
    _check_instructions(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
    with torch.serialization.safe_globals(_ALLOWED):
        return torch.load(path, weights_only=True, **settings)


def _check_sizes(archive: zipfile.ZipFile) -> None:
    """Bound the memory and time that the file can take: 4 KB of compressed zeros are 4 MB of pickle instructions."""
    files = archive.infolist()
    if sum(file.file_size for file in files) > os.path.getsize(str(archive.filename)):
        raise pickle.UnpicklingError("compressed, which torch does not write")
    if any(file.file_size > MAX_PICKLE_BYTES for file in files if file.filename.endswith("data.pkl")):
        raise pickle.UnpicklingError(f"a pickle of more than {MAX_PICKLE_BYTES} bytes")


def _check_instructions(data: bytes) -> None:
    """Bound the values in a tuple, since Python hashes a dict's keys recursively in C, and a million nested tuples
    overflow the stack; and refuse the types that torch allows but whose size is a number in the file."""
    stack: list[int] = []  # number of values in each tuple, counted once per occurrence; 1 for others, 0 for a mark
    memo: dict[Any, int] = {}
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif instruction.name in ("BINGET", "LONG_BINGET", "MARK"):
            stack.append(0 if instruction.name == "MARK" else memo[argument])
        elif instruction.name == "GLOBAL" and re.search(r" (bytearray|\w+Tensor)$", str(argument)):
            raise pickle.UnpicklingError(f"it would allocate a {argument}, which checkpoints do not need")
        else:
            taken, values = instruction.stack_before, 1
            if pickletools.stackslice in taken:  # everything above the last mark
                while (count := stack.pop()) > 0:
                    values += count
                taken = taken[: taken.index(pickletools.markobject)]
            values += sum(stack.pop() for _ in taken)
            makes_tuple = "TUPLE" in instruction.name or instruction.name in ("REDUCE", "NEWOBJ")
            if makes_tuple and values > MAX_TUPLE_VALUES:
                raise pickle.UnpicklingError(f"a tuple of more than {MAX_TUPLE_VALUES} values")
            stack += [values if makes_tuple else 1] * len(instruction.stack_after)


def _contents(held: Any, *, weights_only: bool) -> dict[str, Any]:
    """The entries of a checkpoint that Composer needs, with all checks that do not need the run."""
    fields = {"state": _record(_WEIGHTS)} if weights_only else {"state": _record(_TRAINING), "rng": _RANKS}
    kept = validate(held, fields)
    for name, _ in kept["state"].get("algorithms", ()):
        required = getattr(getattr(composer.algorithms, name, None), "required_on_load", None)
        if required is not None and required():  # Composer would build it by evaluating the file's text
            raise pickle.UnpicklingError(f"it was trained with {name}, which changes the model")
    return kept


def validate(value: Any, fields: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The ``fields`` of a dict (name → type) in new containers. Types are strict: an int is no bool, a list no tuple.

    Raises:
        MalformedError: A field is missing or has another type; ``path`` are the keys that lead to ``value``.
    """
    try:
        return TypeAdapter(_record(fields)).validate_python(value, strict=True)  # type: ignore[no-any-return]
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        keys = [*filter(None, [path]), *map(str, problem["loc"])]
        raise MalformedError("/".join(keys), problem["msg"]) from error


def match_template(value: Any, template: Any, path: str) -> Any:
    """``value``, if it has the keys, lengths and shapes of ``template``, a value of this run.

    Raises:
        MalformedError: The first difference.
    """
    held, own = _entries(value), _entries(template)
    missing, more = ([name for name in one if name not in other] for one, other in ((own, held), (held, own)))
    if missing or more:
        differences = [f"has no {name}" for name in missing[:1]]
        differences += [f"has {name!r:.200}, which this run does not have" for name in more[:1]]
        raise MalformedError(path, " and ".join(differences))
    shape, expected = (tuple(getattr(one, "shape", ())) for one in (value, template))
    if shape != expected:
        raise MalformedError(path, f"has the shape {shape}, not {expected}")
    for name, entry in own.items():
        match_template(held[name], entry, f"{path}/{name}")
    return value


def _entries(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}


def keep_loadable(held: dict[str, Any], state: State, *, weights_only: bool) -> None:
    """Reduce a checkpoint to what Composer may load into ``state``.

    Args:
        held: The contents as read; changed in place, as Composer's ``load_ignore_keys`` is allowed to do.
        state: The run's state, after its algorithms changed the model.
        weights_only: Keep only the weights.

    Raises:
        ConfigError: It was written with other techniques, or while another number of ranks read a stream.
        MalformedError: It does not fit the run; the message says where.
    """
    absent = state.load_monolith_rank0_only and dist.get_global_rank() != 0  # only rank 0 has the tensors
    if absent:
        held["state"] |= {"model": {}, "optimizers": {}}
    kept = _contents(held, weights_only=weights_only)
    loaded = kept["state"]
    if weights_only:
        loaded.pop("algorithms", None)
    else:
        _check_ranks(len(kept["rng"]), state)
        _keep_states(loaded, state)
    if absent:
        loaded.update({name: None for name in ("model", "optimizers") if name in loaded})
    elif state.fsdp_config_version != 1:  # FSDP1's flat parameters have other names and shapes; torch checks them
        match_template(loaded["model"], get_model_state_dict(state.model), "state/model")
        if not weights_only:
            if (host := host_of(state)) is not None:  # a technique may freeze parameters, which then have no state
                host.load_state_dict(loaded["callbacks"]["Host"])
            optimizers = {_class(o): get_optimizer_state_dict(state.model, o) for o in state.optimizers}
            match_template(loaded["optimizers"], optimizers, "state/optimizers")
    held.clear()
    held.update(kept)


def _check_ranks(before: int, state: State) -> None:
    """Refuse to continue a stream on another number of ranks, which would skip some rows and repeat others."""
    now, rows = dist.get_world_size(), getattr(state.train_dataloader, "dataset", None)
    if before != now and isinstance(rows, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"checkpoint.load: it was written while {before} rank{'s' * (before > 1)} read the stream, and {now} would "
            f"continue with other rows; start with composer -n {before}, or checkpoint.weights_only=true loads its "
            "weights only"
        )


def _keep_states(loaded: dict[str, Any], state: State) -> None:
    """Reduce the states of algorithms, callbacks, schedulers and the scaler to those that this run has.

    Algorithms become a dict, in which Composer looks the run's own up; it would evaluate the entries of a list.
    """
    host = loaded["callbacks"].get("Host")
    names = validate(host, Host.checkpoint_fields, "state/callbacks/Host")["techniques"] if host else []
    refuse_other_techniques(names, techniques_of(state.algorithms))
    schedulers = {_class(scheduler): scheduler.state_dict() for scheduler in state.schedulers}
    scaler = {_class(state.scaler): state.scaler.state_dict()} if state.scaler else {}
    loaded |= {
        "algorithms": _declared(dict(loaded["algorithms"]), state.algorithms, "state/algorithms"),
        "callbacks": _declared(loaded["callbacks"], state.callbacks, "state/callbacks"),
        "schedulers": match_template(loaded["schedulers"], schedulers, "state/schedulers"),
        "scaler": match_template({name: loaded["scaler"].get(name, {}) for name in scaler}, scaler, "state/scaler"),
    }


def _declared(states: dict[str, Any], objects: Sequence[Any], path: str) -> dict[str, Any]:
    """The states of the run's algorithms or callbacks, reduced to the ``checkpoint_fields`` that their classes declare.
    Others receive their own state, which changes nothing; without one, Composer would warn."""
    kept = {}
    for item in objects:
        name, fields = _class(item), getattr(item, "checkpoint_fields", None)
        if fields is None:
            kept[name] = item.state_dict()
        elif name in states:  # otherwise Composer warns that it is not restored
            kept[name] = validate(states[name], fields, f"{path}/{name}")
    return kept


def _class(value: Any) -> str:
    return type(value).__qualname__
