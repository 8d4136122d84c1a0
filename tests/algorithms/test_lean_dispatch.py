"""Each event reaches the same callbacks, loggers and algorithms as in Composer's Trainer, in the same order."""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import OptimizerMonitor
from composer.core import Algorithm, Callback, Engine, Event, State, Time, Timestamp, TimeUnit
from composer.core import data_spec as composer_data_spec
from composer.loggers import InMemoryLogger, Logger
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from composer.trainer import trainer as composer_trainer
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import BatchEncoding

from composer_speedups import FusedOptimizer, LeanDispatch
from composer_speedups.core.errors import Refusal
from composer_speedups.packing.rows import row_lengths
from tests.helpers.common import (
    data_spec,
    final_weights,
    fit_and_close,
    grouped_adamw,
    make_trainer,
    plain_batches,
    tiny_bert,
    trained,
)

STEP = 13  # events of a training batch


class Heard(list[tuple[str, str, int]]):
    """(Who, event, batch), in order."""

    def note(self, who: object, event: Event, state: State) -> None:
        self.append((type(who).__name__, event.value, state.timestamp.batch.value))


class Everything(Callback):
    """Overrides ``run_event``; adds a callback in batch 1 and a logger in batch 2, each inside an event."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.heard.note(self, event, state)
        if (event, state.timestamp.batch) == (Event.BEFORE_LOSS, 1):
            state.callbacks.append(Later(self.heard))
        if (event, state.timestamp.batch) == (Event.AFTER_LOSS, 2):
            state.callbacks.append(LateLogger(self.heard))


class Later(Callback):
    def __init__(self, heard: Heard) -> None:
        self.heard = heard

    def before_loss(self, state: State, logger: Logger) -> None:
        self.heard.note(self, Event.BEFORE_LOSS, state)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.heard.note(self, Event.BATCH_END, state)
        if state.timestamp.batch == 3:
            state.callbacks.remove(self)


class LateLogger(InMemoryLogger):
    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self.heard = heard

    def after_loss(self, state: State, logger: Logger) -> None:
        self.heard.note(self, Event.AFTER_LOSS, state)


class Traced(LateLogger):
    def log_traces(self, traces: dict[str, Any]) -> None:
        self.heard += [(key, "traced", value) for key, value in traces.items()]


class OnInstance(Callback):
    """Its handler is an attribute of the instance."""

    def __init__(self, heard: Heard) -> None:
        self.eval_batch_end = lambda state, logger: heard.note(self, Event.EVAL_BATCH_END, state)  # type: ignore


class EverySecondBatch(Algorithm):
    """Matches by state, and adds a callback, which hears the event in which it was added."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard

    def match(self, event: Event, state: State) -> bool:
        if event in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD):
            self.heard.note("match", event, state)
            return state.timestamp.batch.value % 2 == 1
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> int:
        self.heard.note(self, event, state)
        if event == Event.AFTER_FORWARD and state.timestamp.batch == 3:
            state.callbacks.append(Everything(self.heard))
        return state.timestamp.batch.value


class Another(EverySecondBatch):
    """After the first one at BEFORE_FORWARD, before it at AFTER_FORWARD."""


def run(lean: bool, **settings: Any) -> tuple[Heard, dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    heard = Heard()
    logged = Traced(heard)
    techniques = [LeanDispatch()] if lean else []
    trainer = make_trainer(
        [EverySecondBatch(heard), *techniques, FusedOptimizer(), GradientClipping("norm", 0.1), Another(heard)],
        batches=plain_batches(5),
        callbacks=[Everything(heard), OnInstance(heard), OptimizerMonitor()],
        loggers=logged,
        eval_dataloader=data_spec(plain_batches(2)),
        eval_interval="2ba",
        **settings,
    )
    trainer.fit()
    evidence = techniques[0].evidence if techniques else {}
    weights = final_weights(trainer)
    trainer.close()
    times = ("wall_clock", "time/")
    data = {key: [v for _, v in values] for key, values in logged.data.items() if not key.startswith(times)}
    return heard, weights, data, evidence


@pytest.mark.pins
def test_everyone_hears_what_they_hear_without_it() -> None:
    expected, weights, logged, _ = run(lean=False)
    heard, lean_weights, lean_logged, evidence = run(lean=True)
    assert [entry for entry in heard if "LeanDispatch" not in entry[0]] == expected  # its own trace at INIT
    assert {"Later", "LateLogger", "OnInstance", "Another", "EverySecondBatch"} <= {who for who, *_ in heard}
    torch.testing.assert_close(lean_weights, weights, rtol=0, atol=0)
    assert lean_logged.keys() == logged.keys()
    assert any(how == "traced" and "Another" in who for who, how, _ in heard)
    assert lean_logged == logged
    assert evidence["events_per_batch"] >= STEP
    assert evidence["calls_left_out_per_batch"] > 2 * STEP


@pytest.mark.filterwarnings("ignore:The profiler is enabled:UserWarning", "ignore:.*Profiler clears events:UserWarning")
def test_a_profiler_or_a_pass_goes_composers_way(tmp_path: Any) -> None:
    profiler = Profiler(cyclic_schedule(wait=0, warmup=1, active=2), [JSONTraceHandler(str(tmp_path))])
    technique = LeanDispatch()
    with pytest.raises(Refusal, match="ran no event through it"):
        make_trainer([technique], profiler=profiler).fit()
    trainer = make_trainer([technique := LeanDispatch()], batches=plain_batches(3))
    orders = []

    def own_pass(algorithms: Any, event: Event) -> Any:
        orders.append(event)
        return algorithms

    class Adds(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            trainer.engine.register_pass(own_pass)

    trainer.state.callbacks.append(Adds())
    trainer.fit()
    assert orders.count(Event.BEFORE_FORWARD) == 1 + 2
    assert technique.evidence["events_per_batch"] == STEP - 1  # of the first batch alone, without BATCH_CHECKPOINT
    trainer.close()


@pytest.mark.parametrize("metrics", [False, True])
def test_a_batch_is_copied_for_training_metrics_only(metrics: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []

    def noted(value: Any) -> Any:
        copied.append(value)
        return copy.deepcopy(value)

    monkeypatch.setattr(composer_trainer, "deepcopy", noted)
    trainer = make_trainer([LeanDispatch()], batches=plain_batches(2))
    copied.clear()
    if metrics:
        trainer.state.train_metrics = {"accuracy": MulticlassAccuracy(num_classes=2)}
    trainer.fit()
    assert len([value for value in copied if "input_ids" in value]) == (2 if metrics else 0)
    assert not metrics or float(trainer.state.train_metrics["accuracy"].compute()) >= 0
    trainer.close()


def test_memory_statistics_and_the_walk_for_fsdp_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, result: Any) -> Any:
        calls.append(name)
        return result

    monkeypatch.setattr(State, "fsdp_enabled", property(lambda state: noted("walk", False)))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: noted("stats", {"num_alloc_retries": 1}))

    class OnGPU(Callback):
        def after_train_batch(self, state: State, logger: Logger) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

        def batch_end(self, state: State, logger: Logger) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
            assert torch.cuda.memory_stats() == {"num_alloc_retries": 1}  # for other callers
            assert not state.fsdp_enabled

    trainer = make_trainer([LeanDispatch()], batches=plain_batches(4), callbacks=[OnGPU()])
    trainer.state.auto_microbatching = False
    calls.clear()
    trainer.fit()
    assert (calls.count("stats"), calls.count("walk")) == (4, 1)
    assert trainer.cumulative_alloc_retries == 0
    trainer.close()


def test_algorithms_that_were_removed_between_epochs_are_not_asked() -> None:
    heard = Heard()

    class Empties(Callback):
        def epoch_end(self, state: State, logger: Logger) -> None:
            state.algorithms.clear()

    algorithms = [LeanDispatch(), EverySecondBatch(heard)]
    trained(algorithms, batches=plain_batches(2), callbacks=[Empties()], max_duration="2ep")
    assert {batch for _, _, batch in heard} == {0, 1}


def test_composers_functions_are_given_back_when_the_last_trainer_closes() -> None:
    def now() -> list[Any]:
        times = [
            Time.__init__,
            Time._cmp,
            Timestamp.get,
            Timestamp.to_next_batch,
            Trainer._accumulate_time_across_ranks,
        ]
        return [
            Engine.run_event,
            State.fsdp_enabled,
            torch.cuda.memory_stats,
            composer_trainer.deepcopy,
            composer_data_spec._split_mapping,
            *times,
        ]

    before = now()
    assert before[3] is copy.deepcopy
    one, other = (make_trainer([LeanDispatch()]) for _ in range(2))
    assert not set(map(id, now())) & set(map(id, before))
    fit_and_close(one)
    other.fit()
    assert Engine.run_event is not before[0]
    other.close()
    assert now() == before


def test_times_are_computed_as_by_composer() -> None:
    def outcome(compute: Callable[[], Any]) -> Any:
        try:
            value = compute()
        except Exception as error:
            return repr(error)
        return repr(value), type(getattr(value, "_value", value))

    def outcomes() -> list[Any]:
        later = Timestamp(batch=3, sample=30, epoch=1, token=7, total_wct=timedelta(seconds=9))
        steps = [(4, 50, timedelta(seconds=2)), (Time(4, "sp"), 0, timedelta(seconds=1)), (2, Time(3, "tok"), None)]
        found = [outcome(lambda step=step: later.to_next_batch(*step)) for step in (*steps, (), (1.0,))]  # type: ignore
        found += [outcome(lambda unit=unit: later.get(unit)) for unit in [*TimeUnit, "ba", "epoch"]]  # type: ignore
        values = [1, True, 0.5, float("inf"), "1", None]
        found += [outcome(lambda v=v, u=u: Time(v, u)) for v in values for u in [*TimeUnit, "ba", "dur", "x"]]  # type: ignore
        times = [Time(1, "ba"), Time(2, TimeUnit.BATCH), Time(1, "ep"), Time(0.5, "dur"), Time(1, "dur")]
        others = [*times, 1, 2, True, 0.5, "1ba", "0.5dur", None]
        compare = [operator.eq, operator.ne, operator.lt, operator.ge, operator.add, operator.truediv, operator.mod]
        found += [outcome(lambda o=o, a=a, b=b: o(a, b)) for o in compare for a in times for b in others]  # type: ignore
        return found + [outcome(lambda o=o, b=b: o(later, b)) for o in compare[:4] for b in others]  # type: ignore

    expected = outcomes()
    trainer = make_trainer([LeanDispatch()])
    assert outcomes() == expected
    trainer.close()
    assert len(set(map(str, expected))) > 50


def test_a_batch_is_split_as_by_composer(monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[Any] = []
    composers = composer_data_spec._split_tensor

    def noted(tensor: Tensor, size: int) -> Any:
        split.append(tensor)
        return composers(tensor, size)

    monkeypatch.setattr(composer_data_spec, "_split_tensor", noted)
    ids, labels = torch.arange(12).reshape(4, 3), torch.arange(4)
    whole = {"input_ids": ids, "_row_lengths": row_lengths(np.array([3, 2, 1, 3])), "labels": labels}
    batches: list[Any] = [whole, BatchEncoding(dict(whole)), {}, ids, (ids, labels), ["a", "b", "c", "d"], [], 1]
    others = [labels[:2], labels.repeat(2), list("abcd"), list("ab"), (1, 2, 3, 4), {"labels": labels}, "a", True, None]
    batches += [whole | {"other": other} for other in [*others, torch.tensor(1), torch.nn.Parameter(ids.float())]]
    batches += [{"other": other} | whole for other in others]

    def outcome(batch: Any, size: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                parts = composer_data_spec.default_split_batch(batch, size)
            except Exception as error:
                parts = repr(error)
        types = [(type(part), *((k, type(v)) for k, v in getattr(part, "items", dict)())) for part in parts]
        return type(parts), types, str(parts), [str(warning.message) for warning in caught]

    sizes = [4, 2, 3, 5, 4.0]
    expected = [outcome(batch, size) for batch in batches for size in sizes]
    trainer = make_trainer([LeanDispatch()])
    assert [outcome(batch, size) for batch in batches for size in sizes] == expected
    split.clear()
    (part,) = composer_data_spec.default_split_batch(whole, 4)
    assert not split
    assert part["labels"]._base is labels
    part.pop("input_ids")
    part["labels"].unsqueeze_(1)
    assert whole["input_ids"] is ids
    assert labels.shape == (4,)
    trainer.close()


@pytest.mark.parametrize(("own", "profiled"), [(False, False), (True, False), (False, True)])
def test_gradients_are_dropped_without_torchs_loop(own: bool, profiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    torchs = torch.optim.Optimizer.zero_grad

    def noted(self: Any, set_to_none: bool = True) -> None:
        called.append("torch" if set_to_none else "to zero")
        torchs(self, set_to_none)

    class OwnAdamW(torch.optim.AdamW):
        def zero_grad(self, set_to_none: bool = True) -> None:
            called.append("own")
            super().zero_grad(set_to_none)

    class Watches(Callback):
        def before_forward(self, state: State, logger: Logger) -> None:
            assert all(parameter.grad is None for parameter in state.model.parameters())

        def batch_end(self, state: State, logger: Logger) -> None:
            (optimizer,) = state.optimizers
            optimizer.zero_grad(set_to_none=False)
            assert not any(p.grad.any() for group in optimizer.param_groups for p in group["params"])
            optimizer.zero_grad()
            assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
            state.model(state.batch)["logits"].sum().backward()

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", noted)
    model = tiny_bert()
    optimizer = grouped_adamw(model)
    if own:
        optimizer.__class__ = OwnAdamW
    trainer = make_trainer(
        [LeanDispatch()], batches=plain_batches(2), model=model, optimizer=optimizer, callbacks=[Watches()]
    )
    with torch.autograd.profiler.profile(enabled=profiled) as profile:
        trainer.fit()
    trainer.close()
    once = ["own", "torch"] if own else ["torch"]
    in_step = once if own or profiled else []
    assert called == [*in_step, *once[:-1], "to zero", *once] * 2 + once  # the last one is that of fit()
    if profiled:
        ranges = [event.name for event in profile.function_events or ()]
        assert ranges.count("Optimizer.zero_grad#AdamW.zero_grad") == 2 * 3 + 1


def test_samples_and_time_of_one_rank_are_summed_as_by_composer() -> None:
    composers, trainers = Trainer._accumulate_time_across_ranks, [make_trainer([LeanDispatch()]), make_trainer()]
    counts = [0, 4, -1, 2**31 - 1, 2**31, -(2**31) - 1, True, 2.0, 2.5, 2.5 + 2.5e-5, torch.tensor(3)]
    durations = [
        timedelta(0),
        timedelta(microseconds=1),
        timedelta(seconds=1, microseconds=234567),
        timedelta(99, 1, 1),
    ]

    def outcome(method: Any, trainer: Trainer, samples: Any, tokens: Any, duration: timedelta) -> Any:
        try:
            result = method(trainer, samples, tokens, duration)
        except Exception as error:
            return repr(error)
        return result, [*map(type, result)]

    cases = [(samples, tokens, duration) for samples in counts for tokens in counts for duration in durations]
    for trainer in trainers:
        for case in cases:
            assert outcome(Trainer._accumulate_time_across_ranks, trainer, *case) == outcome(composers, trainer, *case)
        trainer.close()


@pytest.mark.parametrize(("owner", "name"), [(Engine, "run_event"), (Trainer, "_accumulate_time_across_ranks")])
def test_another_replacement_of_a_method_is_refused(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    composers = getattr(owner, name)
    replacing = functools.wraps(composers)(lambda *args: composers(*args))
    monkeypatch.setattr(owner, name, replacing)
    with pytest.raises(Refusal, match=rf"other code has replaced Composer's {owner.__name__}\.{name}"):
        make_trainer([LeanDispatch()])
