"""Which batches count as warm-up, and which phase is charged for queued GPU work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.loggers import InMemoryLogger
from composer.utils import dist

from composer_speedups import ThroughputMonitor, TorchCompile
from composer_speedups.callbacks import throughput as module
from composer_speedups.callbacks.throughput import PhaseClock
from tests.helpers.clock import Clock
from tests.helpers.common import Batches, batch, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.ranks import on_ranks


@pytest.mark.pins
def test_batches_that_compile_count_as_warm_up() -> None:
    monitor = ThroughputMonitor(warmup_batches=1)
    shapes = [batch([length] * 4) for length in (8, 8, 8, 16, 16, 16)]
    trained([TorchCompile(backend="eager", dynamic=False)], batches=shapes, callbacks=[monitor], model=labelled())
    assert [b.steady for b in monitor.batches] == [False, True, True, False, True, True]
    summary = monitor.summary()
    compiling = sum(b.seconds for b in monitor.batches if not b.steady)
    assert summary["warmup_seconds"] >= compiling > 0
    assert summary["steady_batches"] == 4


def test_queued_gpu_work_is_charged_to_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead: a forward pass takes no time until something synchronizes."""
    clock, monitor = Clock(), ThroughputMonitor(warmup_batches=2)
    monitor.clock = PhaseClock(clock)
    queued: list[float] = []

    def wait(_: torch.device) -> None:
        clock.now += sum(queued)
        queued.clear()

    monkeypatch.setattr(module, "_synchronize", wait)
    rows = Batches([{k: v[0] for k, v in batch([8]).items()} for _ in range(4)])
    trainer = make_trainer(
        batches=plain_batches(6),
        callbacks=[monitor],
        eval_dataloader=torch.utils.data.DataLoader(rows, batch_size=2),
        eval_interval="4ba",
    )
    forward = trainer.state.model.forward

    def launch(inputs: Any) -> Any:
        if trainer.state.model.training:
            clock.now += 0.05
            queued.append(0.2)
        return forward(inputs)

    trainer.state.model.forward = launch  # type: ignore[method-assign, assignment]
    trainer.fit()
    trainer.close()
    assert [b.step for b in monitor.batches] == pytest.approx([0.25, 0.25, 0.05, 0.45, 0.05, 0.45])
    summary = monitor.summary()
    assert summary["warmup_seconds"] == pytest.approx(0.5)
    assert summary["eval_seconds"] == 0
    assert summary["between_batches_seconds"] == 0, "the wait before the evaluation is part of the last step only"
    assert sum(b.between for b in monitor.batches) == pytest.approx(0)
    assert summary["samples_per_sec"] == pytest.approx(4 / 0.25)


def test_capturing_a_graph_counts_as_warm_up_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, monitor, captured = Clock(), ThroughputMonitor(warmup_batches=1), [100.0]
    monitor.clock = PhaseClock(clock)
    monkeypatch.setattr(module, "capture_seconds", lambda: captured[0])
    trainer = make_trainer(batches=plain_batches(4), callbacks=[monitor])
    forward = trainer.state.model.forward

    def capture(inputs: Any) -> Any:
        seconds = 3.0 if trainer.state.timestamp.batch.value == 2 else 0.0
        captured[0] += seconds
        clock.now += 0.5 + seconds
        return forward(inputs)

    trainer.state.model.forward = capture  # type: ignore[method-assign, assignment]
    trainer.fit()
    trainer.close()
    assert [b.step for b in monitor.batches] == pytest.approx([0.5] * 4)
    assert [b.steady for b in monitor.batches] == [False, True, True, True]
    assert monitor.summary()["warmup_seconds"] == pytest.approx(0.5 + 3.0)
    assert monitor.summary()["samples_per_sec"] == pytest.approx(4 / 0.5)


def one_rank_captures() -> tuple[dict[str, Any], list[bool]]:
    """Train with batches of 0.5 s; return the summary and whether each batch was in steady state.

    Rank 1 captures a graph for 3 s in the third batch, and rank 0 waits for it. Each batch's data takes rank 0 0.25 s
    and rank 1 0.75 s. After each batch, rank 0 is busy for 0.125 s and rank 1 for 0.375 s.
    """
    clock, monitor, captured = Clock(), ThroughputMonitor(warmup_batches=1), [0.0]
    monitor.clock = PhaseClock(clock)
    module.capture_seconds = lambda: captured[0]  # not restored: the process ends with this function
    module.device_peak = lambda *_: module.Peak(1e6, "fp32", "datasheet")
    trainer = make_trainer(batches=plain_batches(5), callbacks=[monitor])
    forward, after, saving = trainer.state.model.forward, monitor.after_dataloader, monitor.batch_checkpoint

    def capture(inputs: Any) -> Any:
        seconds = 3.0 if trainer.state.timestamp.batch.value == 2 else 0.0
        captured[0] += seconds * dist.get_global_rank()
        clock.now += 0.5 + seconds
        return forward(inputs)

    def waiting(state: Any, logger: Any) -> None:
        clock.now += 0.75 if dist.get_global_rank() else 0.25
        after(state, logger)

    def busy(state: Any, logger: Any) -> None:
        clock.now += 0.375 if dist.get_global_rank() else 0.125
        saving(state, logger)

    trainer.state.model.forward = capture  # type: ignore[method-assign, assignment]
    monitor.after_dataloader = waiting  # type: ignore[method-assign]
    monitor.batch_checkpoint = busy  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    return monitor.summary(), [b.steady for b in monitor.batches]


def test_a_capture_on_one_rank_counts_as_warm_up_on_every_rank() -> None:
    flops = module.training_flops(tiny_bert().config, torch.tensor([12, 7, 16, 10]), "classification")
    waited, ranks = (0.25 + 0.75) / 2, on_ranks(one_rank_captures)
    for summary, steady in ranks:
        assert steady == [False, True, False, True, True]
        assert summary["samples_per_sec"] == pytest.approx(2 * 4 / (0.5 + waited))
        assert summary["samples_per_sec_step"] == pytest.approx(2 * 4 / 0.5)
        assert summary["tokens_per_sec"] == pytest.approx(2 * 45 / (0.5 + waited))
        assert summary["data_seconds"] == pytest.approx(waited)
        assert summary["data_wait_fraction"] == pytest.approx(waited / (0.5 + waited))
        assert summary["between_batches_seconds"] == pytest.approx((0.125 + 0.375) / 2)
        assert summary["mfu"] == pytest.approx(flops / (0.5 + waited) / 1e6), "per device"
        assert summary["steady_batches"] == 3
    assert [summary["warmup_seconds"] for summary, _ in ranks] == pytest.approx([4.0 + 2 * 0.25, 4.0 + 2 * 0.75])


def labelled() -> Any:
    model = tiny_bert()
    model.config.problem_type = "single_label_classification"  # otherwise the second batch recompiles
    return model


@pytest.mark.pins
def test_the_first_value_is_logged_by_batch_nine_even_if_every_batch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = iter(range(1000))
    monkeypatch.setattr(module, "counters", {"stats": SimpleNamespace(__getitem__=None)})
    monkeypatch.setitem(module.counters, "stats", _Counting(graphs))
    logger = InMemoryLogger()
    trained(batches=plain_batches(12), callbacks=[ThroughputMonitor(warmup_batches=8)], loggers=[logger])
    first = min(t.batch.value for t, _ in logger.data["throughput/samples_per_sec"])
    assert first == 9


class _Counting:
    def __init__(self, values: Any) -> None:
        self.values = values

    def __getitem__(self, _: str) -> int:
        return next(self.values)
