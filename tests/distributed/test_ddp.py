"""OverlappedDDP in any Trainer: gradients are views of the buckets and equal those of one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Trainer, algorithms
from composer.callbacks import MemoryMonitor, SpeedMonitor
from composer.core import Callback, DataSpec, Event, State
from composer.distributed import dist_strategy
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from composer_speedups import EarlyLoss, FusedOptimizer, LossMonitor, MemoryAnatomy, RunReport, ThroughputMonitor
from composer_speedups.core.trainer_state import model_of
from composer_speedups.distributed import composer_loop
from composer_speedups.distributed.composer_loop import reader_of_gradients, reads_no_gradients
from composer_speedups.distributed.ddp import GradientSums, OverlappedDDP, _by_buckets, sums_of
from composer_speedups.distributed.fsdp import GradientClipping
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import FinetuneModel
from composer_speedups.train.out_of_memory import MicrobatchTrainer
from tests.helpers.common import Batches, fit_and_close, in_turn, make_trainer, plain_batches, tiny_bert
from tests.helpers.ranks import on_ranks
from tests.reference.composition import batches
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near


class LastGradients(Callback):
    """Keep the gradients of the last step, and the number of storages that hold them."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        parameters = list(model_of(state).parameters())
        self.gradients = gradients(model_of(state).model)
        self.pieces = len({p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None})


def make(*, callbacks: Sequence[Callback] = (), bucket_mib: float = 64, **settings: Any) -> Any:
    """Return a Trainer of five batches of four samples, which the ranks share."""
    model: Any = FinetuneModel(tiny_bert(), Classification(), train_metrics=False)
    model.model.config.problem_type = "single_label_classification"
    train_batches = 2 * batches(dist.get_world_size())
    loader = DataLoader(Batches(train_batches), batch_size=None, sampler=in_turn(train_batches))
    return make_trainer(
        train_dataloader=DataSpec(loader, get_num_samples_in_batch=lambda rows: len(rows["labels"])),
        **{"max_duration": "5ba", "model": model, "callbacks": [OverlappedDDP(bucket_mib), *callbacks], **settings},
    )


def trained(microbatch: int) -> tuple[dict[str, Tensor], int]:
    last = LastGradients()
    fit_and_close(make(callbacks=[last], device_train_microbatch_size=microbatch))
    return last.gradients, last.pieces


@pytest.mark.parametrize("microbatch", [2, 1])
def test_gradients_are_bucket_views_and_equal_those_of_one_process(microbatch: int) -> None:
    expected, pieces = trained(2 * microbatch)
    assert pieces == len(expected)
    for averaged, pieces in on_ranks(lambda: trained(microbatch)):
        assert_near(averaged, expected)
        assert pieces < 4, "a few hundred KiB fit into one bucket"


@pytest.mark.parametrize("state", [False, True])
def test_buffers_are_broadcast_only_if_they_are_persistent(state: bool) -> None:
    def seen() -> list[Any]:
        model: Any = FinetuneModel(tiny_bert(), Classification(), train_metrics=False)
        model.model.register_buffer("mine", torch.tensor(1.0 + dist.get_global_rank()), persistent=state)
        trainer = fit_and_close(make(model=model))
        return [trainer.state.model.broadcast_buffers, float(model.model.mine)]

    assert on_ranks(seen) == ([[True, 1.0], [True, 1.0]] if state else [[False, 1.0], [False, 2.0]])


def overlapped(*, callbacks: Sequence[Callback] = (), **settings: Any) -> tuple[int, list[Tensor]]:
    """Train with buckets of 10 KiB; return the number of overlapped steps and the final weights."""
    trainer = fit_and_close(make(callbacks=callbacks, bucket_mib=0.01, **settings))
    sums = sums_of(trainer.state.model)
    assert not sums.under_way
    assert sums.waits, "after training, a backward pass waits for its gradients"
    said = trainer.state.model._get_ddp_logging_data()
    assert len(said["rebuilt_bucket_sizes"].split(",")) > 5
    assert said["comm_hook"] == GradientSums.send.__qualname__
    assert sums.summary()["gradients_read_by"] == sums.reader
    return sums.overlapped_steps, [p.detach() for p in trainer.state.model.parameters()]


@pytest.mark.parametrize("microbatch", [2, 1])
def test_stepping_bucket_by_bucket_gives_the_same_weights(microbatch: int) -> None:
    def learned() -> list[tuple[int, list[Tensor]]]:
        lists: list[list[Callback]] = [[], [LastGradients()]]
        return [overlapped(callbacks=callbacks, device_train_microbatch_size=microbatch) for callbacks in lists]

    for by_buckets, whole in on_ranks(learned):
        assert (by_buckets[0], whole[0]) == (3, 0), "the first two steps do not overlap"
        assert all(map(torch.equal, by_buckets[1], whole[1]))


class Reader(Callback):
    """Callback that reads gradients at ``event``."""

    def __init__(self, event: str) -> None:
        self.event = event

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event.value == self.event:
            assert all(p.grad is not None for p in state.model.parameters())


class Declared(Callback):
    @reads_no_gradients
    def after_train_batch(self, state: State, logger: Logger) -> None:
        pass


class Overriding(Declared):
    def after_train_batch(self, state: State, logger: Logger) -> None:
        assert all(p.grad is not None for p in state.model.parameters())


class Wrapping(Callback):
    """Callback whose method looks like Composer's own."""

    @functools.wraps(MemoryMonitor.after_train_batch)
    def after_train_batch(self, state: State, logger: Logger) -> None:  # type: ignore[override]
        assert all(p.grad is not None for p in state.model.parameters())


class Plain(Trainer):
    def _train_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        return super()._train_microbatches(*args, **kwargs)


class Hooked(Callback):
    """Callback that registers a hook that torch runs between the backward pass and the step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.kind == "step":
            state.optimizers[0].register_step_pre_hook(lambda *_: None)
        else:
            next(state.model.parameters()).register_post_accumulate_grad_hook(lambda _: None)


def readers(*settings: dict[str, Any]) -> list[tuple[int, str | None]]:
    """Train once per settings; return the number of overlapped steps and the name of what reads gradients."""
    models: list[Any] = [fit_and_close(make(bucket_mib=0.01, **arguments)).state.model for arguments in settings]
    return [(sums.overlapped_steps, sums.reader) for sums in map(sums_of, models) if sums is not None]


def test_steps_do_not_overlap_if_something_may_read_gradients() -> None:
    first, other = on_ranks(
        lambda: readers(
            {"algorithms": [algorithms.GradientClipping("norm", 1.0)]},
            {"algorithms": [GradientClipping("norm", 1.0)]},
            {"callbacks": [Reader("after_backward")]},
            {"callbacks": [Overriding()]},
            {"callbacks": [Wrapping()]},
            {"cls": Plain},
            {"callbacks": [Hooked("step")]},
            {"callbacks": [Hooked("gradient")]},
            {"optimizer": torch.optim.SGD(FinetuneModel(tiny_bert(), Classification()).parameters())},
        )
    )
    assert first == other
    assert first == [
        (0, "GradientClipping"),
        (0, "GradientClipping"),
        (0, "Reader.run_event"),
        (0, "Overriding.after_train_batch"),
        (0, "Wrapping.after_train_batch"),
        (0, "Plain._train_microbatches"),
        (0, "a hook on AdamW.step"),
        (0, "a hook on a parameter's gradient"),
        (0, "SGD, which is not AdamW"),
    ]


def test_steps_overlap_if_nothing_reads_gradients() -> None:
    """Neither does ``early_loss``, which replaces one of the Trainer's methods."""

    def watched() -> list[tuple[int, str | None]]:
        EarlyLoss.needs = lambda *_: ()  # type: ignore[method-assign, assignment, return-value]  # on the CPU
        watching = [MemoryAnatomy(), ThroughputMonitor(), LossMonitor(), RunReport()]
        watching += [Declared(), SpeedMonitor(), MemoryMonitor()]
        return readers({"callbacks": watching, "cls": MicrobatchTrainer, "algorithms": [FusedOptimizer(), EarlyLoss()]})

    assert on_ranks(watched) == [[(3, None)]] * 2


class StepAtStart(Callback):
    """Notes the optimizer's own ``step`` before training: that of Composer's scheduler, or, without one, none."""

    def __init__(self, scheduled: bool) -> None:
        self.scheduled = scheduled

    def fit_start(self, state: State, logger: Logger) -> None:
        attributes = vars(state.optimizers[0])
        if not self.scheduled:
            del attributes["step"]
        self.step = attributes.get("step")


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_optimizers_step_is_given_back_after_training(scheduled: bool) -> None:
    def steps() -> list[Any]:
        noted = StepAtStart(scheduled)
        settings: dict[str, Any] = {"callbacks": [noted, OverlappedDDP(0.01)]}  # in this order
        trainer = fit_and_close(make(**settings))
        sums, after = sums_of(trainer.state.model), vars(trainer.state.optimizers[0]).get("step")
        return [after is noted.step, sums is not None and sums.overlapped_steps]

    assert on_ranks(steps) == [[True, 3]] * 2


def test_steps_do_not_overlap_in_an_unknown_training_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    state = trainer.state

    def composer_closure() -> Any:
        self = trainer
        return lambda: self

    assert reader_of_gradients(state, composer_closure()) is None
    assert reader_of_gradients(state, None) == "a training loop that is not Composer's"
    assert reader_of_gradients(state, lambda: None) == "a training loop that is not Composer's"
    monkeypatch.setattr(composer_loop, "version", lambda _: "0.33.0")
    assert reader_of_gradients(state, composer_closure()) == "the training loop of composer 0.33.0"
    trainer.close()


def test_a_bucket_is_stepped_before_the_next_one_arrives() -> None:
    parameters = [torch.nn.Parameter(torch.ones(())) for _ in range(4)]
    number = {parameter: i for i, parameter in enumerate(parameters)}
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1e-4}], lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones(())
    log: list[Any] = []
    sums = GradientSums()
    held: list[list[Tensor]] = [[parameters[3]], [parameters[0], parameters[2]]]
    for i, bucket in enumerate(held):
        sums._under_way.append((bucket, SimpleNamespace(wait=partial(log.append, f"bucket {i} arrived"))))

    def step() -> None:
        log.append([[number[p] for p in group["params"]] for group in optimizer.param_groups])

    _by_buckets(sums, step)(optimizer)
    assert log == [[[1], []], "bucket 0 arrived", [[], [3]], "bucket 1 arrived", [[0], [2]]]
    log.clear()
    step()
    assert log == [[[0, 1], [2, 3]]], "the parameter groups are restored"


def test_composers_own_ddp_is_left_alone() -> None:
    def kinds() -> list[Any]:
        ours, stock = make(), make_trainer(batches=plain_batches(2 * dist.get_world_size()))
        stocks = [sums_of(ours.state.model) is None, sums_of(stock.state.model) is None]
        stocks.append(dist_strategy.DistributedDataParallel is DistributedDataParallel)
        ours.close()
        stock.close()
        return stocks

    assert on_ranks(kinds) == [[False, True, True]] * 2
    make().close()
    assert dist_strategy.DistributedDataParallel is DistributedDataParallel
