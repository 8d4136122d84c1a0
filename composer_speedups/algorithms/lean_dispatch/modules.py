"""The replacement of ``Engine.run_event``, and of what Composer computes in every batch without using it.

Neither Composer's State nor its Logger references the Engine, so functions are replaced on their classes and modules.
They act only for Trainers that have the technique, and call Composer's own code for others. Times and the split of a
batch have no reference to a Trainer, so they are replaced for all, with the same results.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from composer import Trainer
from composer.core import Callback, Engine, Event, State, Time, Timestamp, TimeUnit, data_spec
from composer.core.engine import Trace, _get_default_passes, _setup_trace
from composer.loggers import Logger, LoggerDestination
from composer.trainer import trainer as composer_trainer
from composer.utils import dist
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer

from composer_speedups.core.host import Host
from composer_speedups.core.technique import Technique
from composer_speedups.distributed.composer_loop import TESTED_COMPOSER, is_defined_in_composer, other_composer
from composer_speedups.packing.rows import RowLengths

# Events of each batch. All others are rare and may change what the tables below are made of.
_LEAN = {
    *("before_dataloader", "after_dataloader", "batch_start", "before_train_batch", "before_forward", "after_forward"),
    *("before_loss", "after_loss", "before_backward", "after_backward", "after_train_batch", "batch_end"),
    *("batch_checkpoint", "eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"),
}
_COUNTERS = {unit._value_: f"_{unit._name_.lower()}" for unit in TimeUnit if hasattr(Timestamp, unit._name_.lower())}
_DEFAULT_PASSES = _get_default_passes()
_installed: dict[int, LeanEvents] = {}  # by the id of the state, of the Trainers that have the technique and are open


def replaced_by_other_code() -> str | None:
    """Why Composer's events cannot be dispatched here; None if they can."""
    if (version := other_composer()) is not None:
        return f"the installed Composer is {version}, and {TESTED_COMPOSER} is the one that was tested"
    for method in (Engine.run_event, Trainer._accumulate_time_across_ranks):
        if not (_installed or is_defined_in_composer(method)):
            return f"other code has replaced Composer's {method.__qualname__}"
    return None


class _Listeners(NamedTuple):
    """The handlers of an event, each with whether it overrides ``run_event``, and the number of the others."""

    callbacks: Sequence[tuple[Callback, bool]]
    loggers: Sequence[tuple[Callback, bool]]
    left_out: int


class LeanEvents:
    """Runs one Trainer's events.

    Attributes:
        events: Number of events that it ran.
        batches: How many of them were the start of a training batch.
        left_out: Number of calls that it left out.
        sharded: Whether FSDP wraps a module; None until Composer asks in a batch.
        in_batch: Whether the last event was one of :data:`_LEAN`.
        alone: Whether this is the only rank.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.events = self.batches = self.left_out = 0
        self.alone = dist.get_world_size() == 1
        self._begin()

    def _begin(self) -> None:
        """Make the table anew in the next batch."""
        self.in_batch = False
        self.sharded: bool | None = None
        self._callbacks: list[Callback] = []  # the callbacks from which the table was made
        self._table: dict[str, _Listeners] = {}
        self._algorithms: list[Any] = []
        self._others: list[Any] = []  # algorithms that are no techniques
        self._debugging = bool(os.environ.get("ENGINE_DEBUG"))

    def per_batch(self) -> dict[str, int]:
        """Evidence: the numbers of a batch, with those of evaluations."""
        batches = max(self.batches, 1)
        return {"events_per_batch": self.events // batches, "calls_left_out_per_batch": self.left_out // batches}

    def install(self) -> None:
        if not _installed:
            _composers.update({name: vars(owner)[name] for owner, name, _ in _REPLACED})
            for owner, name, ours in _REPLACED:
                setattr(owner, name, ours)
            _accumulate_time.composers = _composers["_accumulate_time_across_ranks"]  # type: ignore[attr-defined]
        _installed[id(self.state)] = self

    def uninstall(self) -> None:
        del _installed[id(self.state)]
        if not _installed:
            for owner, name, ours in _REPLACED:
                if vars(owner)[name] is ours:  # unless other code has replaced it since
                    setattr(owner, name, _composers[name])

    def run(self, engine: Engine, event: Event) -> Any:
        """Run an event as ``Engine.run_event`` does; None if Composer's own method is to run it, with its checks."""
        state, name = self.state, event._value_
        if name not in _LEAN:
            self._begin()
            return None
        self.in_batch = not (
            engine._is_closed
            or self._debugging
            or state.profiler is not None
            or state._dataloader is None
            or state._max_duration is None
            or engine.algorithm_passes != _DEFAULT_PASSES
        )
        if not self.in_batch:
            return None
        self.events += 1
        if name == "batch_start":
            self.batches += 1
            if not self.batches & (self.batches - 1):  # 1, 2, 4, …: some handle only the first batches
                self._table = {}
        if state._algorithms != self._algorithms:
            self._algorithms = list(state._algorithms)
            self._others = [algorithm for algorithm in self._algorithms if not isinstance(algorithm, Technique)]
        traces = self._run_algorithms(engine, event) if self._others else OrderedDict()
        listeners = self._listeners(name)
        if listeners.callbacks:
            _call(listeners.callbacks, event, state, engine.logger)
            listeners = self._listeners(name)  # a callback may have added a logger, which hears the same event
        if listeners.loggers:
            _call(listeners.loggers, event, state, engine.logger)
        self.left_out += listeners.left_out + len(self._algorithms) - len(self._others)
        return traces

    def _run_algorithms(self, engine: Engine, event: Event) -> Any:
        matching = [algorithm for algorithm in self._others if algorithm.match(event, self.state)]
        if not matching:
            return OrderedDict()
        matching = list(engine._compile(matching, event))
        traces = _setup_trace(matching, event)
        for order, algorithm in enumerate(matching):
            exit_code = algorithm.apply(event, self.state, engine.logger)
            kind = type(algorithm).__name__
            traces[f"{algorithm}/{event}"] = Trace(name=kind, event=event, exit_code=exit_code, order=order, run=True)
        engine.logger.log_traces({f"algorithm_traces/{t.name}/{t.event}": 1 if t.run else 0 for t in traces.values()})
        return traces

    def _listeners(self, name: str) -> _Listeners:
        callbacks = self.state._callbacks
        if callbacks != self._callbacks:
            self._callbacks, self._table = list(callbacks), {}
        found = self._table.get(name)
        if found is None:
            hearing = [(callback, _has(callback, "run_event")) for callback in callbacks if _hears(callback, name)]
            loggers = [entry for entry in hearing if isinstance(entry[0], LoggerDestination)]
            others = [entry for entry in hearing if not isinstance(entry[0], LoggerDestination)]
            found = self._table[name] = _Listeners(others, loggers, len(callbacks) - len(hearing))
        return found


def _hears(callback: Callback, event: str) -> bool:
    if isinstance(callback, Host):  # which loses handlers in the first batches, and gets none
        return callback.hears(event)
    return _has(callback, "run_event") or _has(callback, event)


def _has(callback: Callback, method: str) -> bool:
    """Whether a callback's class or instance overrides a method."""
    return method in vars(callback) or getattr(type(callback), method) is not getattr(Callback, method)


def _call(listeners: Sequence[tuple[Callback, bool]], event: Event, state: State, logger: Logger) -> None:
    for callback, overrides_run_event in listeners:
        if overrides_run_event:
            callback.run_event(event, state, logger)
        else:
            getattr(callback, event._value_)(state, logger)


def _run_event(self: Engine, event: Event | str) -> Any:
    """Replaces ``Engine.run_event``."""
    events = _installed.get(id(self.state))
    traces = None if events is None else events.run(self, event if type(event) is Event else Event(event))
    return _composers["run_event"](self, event) if traces is None else traces


def _fsdp_enabled(self: State) -> bool:
    """Replaces ``State.fsdp_enabled``, which visits all modules. Once per epoch suffices: models are wrapped before."""
    events = _installed.get(id(self))
    if events is None or not events.in_batch:
        return bool(_composers["fsdp_enabled"].fget(self))
    if events.sharded is None:
        events.sharded = bool(_composers["fsdp_enabled"].fget(self))
    return events.sharded


def _memory_stats(*args: Any, **kwargs: Any) -> Any:
    """Replaces ``torch.cuda.memory_stats``. Composer's loop reads one of its numbers, for automatic micro-batches."""
    events = _calling(Trainer._train_batch)
    unused = events is not None and not events.state.auto_microbatching
    return {"num_alloc_retries": 0} if unused else _composers["memory_stats"](*args, **kwargs)


def _deepcopy(value: Any, *args: Any) -> Any:
    """Replaces Composer's ``deepcopy``. Composer's loop copies each micro-batch, for training metrics."""
    events = _calling(Trainer._train_microbatch)
    unused = events is not None and not events.state.train_metrics
    return None if unused else _composers["deepcopy"](value, *args)


def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """Replaces ``Optimizer.zero_grad``, which opens a profiler range and checks each gradient."""
    if profiler._is_profiler_enabled or _calling(Trainer._train_microbatches) is None:
        _composers["zero_grad"](self, set_to_none)
        return
    for group in self.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _accumulate_time(self: Trainer, num_samples: Any, num_tokens: Any, batch_time: timedelta) -> Any:
    """Replaces Composer's method: sums over one rank, of numbers that fit in int32, and the time in float32."""
    events = _installed.get(id(self.state))
    counted = type(num_samples) is type(num_tokens) is int and max(abs(num_samples), abs(num_tokens)) < 2**31
    if events is None or not events.alone or not counted:
        return _composers["_accumulate_time_across_ranks"](self, num_samples, num_tokens, batch_time)
    return num_samples, num_tokens, timedelta(seconds=float(np.float32(batch_time.total_seconds())))


def _split_mapping(batch: Any, microbatch_size: int) -> Any:
    """Replaces the function that Composer's default ``split_batch`` calls for mappings. A batch that is one micro-batch
    is not split: its tensors become views, as ``torch.split`` makes them."""
    with torch._C.DisableTorchFunctionSubclass():
        whole = all(type(v) in (Tensor, RowLengths) and v.shape[:1] == (microbatch_size,) for v in batch.values())
    if not whole:
        return _composers["_split_mapping"](batch, microbatch_size)
    return [{name: value[...] if type(value) is Tensor else value for name, value in batch.items()}]


def _calling(method: Any) -> LeanEvents | None:
    """The events of the Trainer whose method called the function that calls this one; None for other callers."""
    frame = sys._getframe(2)
    return _installed.get(id(frame.f_locals["self"].state)) if frame.f_code is method.__code__ else None


# Arithmetic with times, whose results are Composer's. Composer looks units up and compares them by name, 30 times per
# batch and more with a scheduler.


def _time(self: Time[Any], value: Any, unit: Any) -> None:
    """Replaces ``Time.__init__``."""
    if type(unit) is TimeUnit and type(value) is (float if unit is TimeUnit.DURATION else int):
        self._value, self._unit = value, unit
    else:
        _composers["__init__"](self, value, unit)


def _cmp(self: Time[Any], other: Any) -> Any:
    """Replaces ``Time._cmp``."""
    theirs = other._value if type(other) is Time and other._unit is self._unit else other
    if type(theirs) is type(self._value):
        return (self._value > theirs) - (self._value < theirs)
    return _composers["_cmp"](self, other)


def _get(self: Timestamp, unit: Any) -> Any:
    """Replaces ``Timestamp.get``."""
    name = _COUNTERS.get(unit._value_) if type(unit) is TimeUnit else None
    return _composers["get"](self, unit) if name is None else vars(self)[name]


def _to_next_batch(self: Timestamp, samples: Any = 0, tokens: Any = 0, duration: Any = None) -> Any:
    """Replaces ``Timestamp.to_next_batch``."""
    if type(samples) is not int or type(tokens) is not int or duration is None:
        return _composers["to_next_batch"](self, samples, tokens, duration)
    later = object.__new__(Timestamp)
    values = vars(later)
    values.update(vars(self))
    for unit, more in ("batch", 1), ("sample", samples), ("token", tokens):
        for name in (f"_{unit}", f"_{unit}_in_epoch", f"_{unit}_in_iteration"):
            if name in values:
                values[name] = Time(values[name]._value + more, values[name]._unit)
    for name in ("_total_wct", "_iteration_wct", "_epoch_wct"):
        values[name] += duration
    values["_batch_wct"] = duration
    return later


_REPLACED: list[tuple[Any, str, Any]] = [
    (Engine, "run_event", _run_event),
    (State, "fsdp_enabled", property(_fsdp_enabled)),
    (torch.cuda, "memory_stats", _memory_stats),
    (composer_trainer, "deepcopy", _deepcopy),
    (Optimizer, "zero_grad", _zero_grad),
    (Trainer, "_accumulate_time_across_ranks", _accumulate_time),
    (data_spec, "_split_mapping", _split_mapping),
    (Time, "__init__", _time),
    (Time, "_cmp", _cmp),
    (Timestamp, "get", _get),
    (Timestamp, "to_next_batch", _to_next_batch),
]
_composers: dict[str, Any] = {}  # what they replaced, by name
