"""ThroughputMonitor with a clock that the test controls: training, waits, evaluation, checkpoints, and warm-up."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composer.core import Event
from composer.loggers import InMemoryLogger
from composer.utils import dist
from PIL import Image

from composer_speedups import Float8Linear, FusedLayers, MixedPrecision, ThroughputMonitor, TorchCompile
from composer_speedups.callbacks import precision
from composer_speedups.callbacks import throughput as module
from composer_speedups.callbacks.precision import device_peak, precision_in_force
from composer_speedups.callbacks.throughput import PhaseClock
from composer_speedups.core.compile_counts import count_capture
from composer_speedups.core.technique import Technique
from composer_speedups.families.flops import flops_counter, training_flops
from composer_speedups.train.plot import plot_run
from tests.helpers.common import SAVING, Batches, batch, fit_and_close, make_trainer, plain_batches, tiny_bert, trained
from tests.helpers.models import tiny_model
from tests.helpers.ranks import on_ranks


class Clock:
    """A clock that stands still except where a test lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_during(self, target: Any, name: str, seconds: float) -> None:
        """Make every call of a method take this many seconds more."""
        original = getattr(target, name)

        def slower(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return original(*args, **kwargs)

        setattr(target, name, slower)

    def pass_after(self, trainer: Any, seconds: dict[Event, float], first: float) -> None:
        """Make this many seconds pass after events, and ``first`` after the start of the first batch."""
        original = trainer.engine.run_event

        def waiting(event: Event) -> Any:
            result = original(event)
            begins = event == Event.BATCH_START and trainer.state.timestamp.batch.value == 0
            self.now += first if begins else seconds.get(event, 0.0)
            return result

        trainer.engine.run_event = waiting


def timed(**settings: Any) -> tuple[Clock, ThroughputMonitor]:
    """Return a clock, and a monitor that reads it."""
    clock = Clock()

    class Timed(ThroughputMonitor):
        def reset(self) -> None:
            super().reset()
            self.clock = PhaseClock(clock)

    return clock, Timed(**settings)


def two_batches() -> torch.utils.data.DataLoader[Any]:
    """Data to evaluate on."""
    return torch.utils.data.DataLoader(Batches([{k: v[0] for k, v in batch([8]).items()}] * 4), batch_size=2)


def fit_slowly(clock: Clock, seconds: float, **settings: Any) -> None:
    """Train with forward passes of this many seconds."""
    trainer = make_trainer(**settings)
    clock.pass_during(trainer.state.model, "forward", seconds)
    fit_and_close(trainer)


@pytest.mark.parametrize(("duration", "total"), [("20ba", 20), ("1ep", 24), ("40sp", 10), ("6ba", 6)])
def test_the_time_of_the_whole_training_is_planned_once_from_steady_batches(duration: str, total: int) -> None:
    (clock, monitor), logger = timed(warmup_batches=2, interval=3), InMemoryLogger()
    trainer = make_trainer(
        batches=[batch([10, 6, 4, 4], seed=i) for i in range(24)],
        callbacks=[monitor],
        loggers=[logger],
        eval_dataloader=two_batches(),
        eval_interval="4ba",
        max_duration=duration,
    )
    clock.pass_during(trainer.state.model, "forward", 0.25)
    clock.pass_during(trainer, "_eval_loop", 100.0)
    clock.pass_after(trainer, {Event.BEFORE_DATALOADER: 0.75}, first=30.0)
    fit_and_close(trainer)
    if total == 6:
        assert "throughput/planned_seconds" not in logger.data
        assert monitor.summary()["planned_seconds"] is None
    else:
        [(when, planned)] = logger.data["throughput/planned_seconds"]
        assert when.batch.value == 9, "the first value after five steady batches"
        assert planned == monitor.summary()["planned_seconds"] == pytest.approx(30 + total * 1.0)


@pytest.mark.pins
def test_training_data_evaluation_and_checkpoints_are_timed_separately(tmp_path: Path) -> None:
    (clock, monitor), logger = timed(window=4, warmup_batches=2, interval=1), InMemoryLogger()
    batches = [batch([10, 6, 4, 4], seed=i) for i in range(8)]
    trainer = make_trainer(
        batches=batches,
        callbacks=[monitor],
        loggers=[logger],
        eval_dataloader=two_batches(),
        eval_interval="4ba",
        save_folder=str(tmp_path),
        save_interval="4ba",
    )
    clock.pass_during(trainer.state.model, "forward", 0.25)
    clock.pass_during(trainer, "_eval_loop", 100.0)
    clock.pass_during(trainer._checkpoint_saver, "_save_checkpoint", 7.0)
    # of callbacks and loggers that come after this one, and a slow first step
    after = {Event.FIT_START: 15.0, Event.BEFORE_DATALOADER: 0.75, Event.BATCH_END: 0.125}
    clock.pass_after(trainer, after, first=30.0)
    fit_and_close(trainer)
    summary = monitor.summary()
    assert summary["samples_per_sec"] == pytest.approx(4 / 1.0)
    assert summary["tokens_per_sec"] == pytest.approx(24 / 1.0)
    assert summary["padding_fraction"] == pytest.approx(1 - 24 / 40)
    assert summary["step_seconds"] == pytest.approx(0.25)
    assert summary["data_seconds"] == pytest.approx(0.75)
    assert summary["data_wait_fraction"] == pytest.approx(0.75)
    assert summary["between_batches_seconds"] == pytest.approx(0.125)
    assert [v for _, v in logger.data["throughput/between_batches_seconds"]] == pytest.approx([0.125] * 6)
    assert [v for _, v in logger.data["throughput/data_wait_fraction"]] == pytest.approx([0.75] * 6)
    assert summary["warmup_seconds"] == pytest.approx(15 + 30 + 2 * 1.0)
    assert summary["eval_seconds"] == pytest.approx(2 * 100 + 2 * 2 * 0.25)
    assert summary["checkpoint_seconds"] == pytest.approx(2 * 7)
    assert (summary["steady_batches"], summary["other_batches"]) == (6, 2)
    logged = [(t.batch.value, value) for t, value in logger.data["throughput/samples_per_sec"]]
    assert [b for b, _ in logged] == list(range(3, 9))
    assert [value for _, value in logged] == pytest.approx([4.0] * 6)
    assert monitor.eval_marks == [4, 8]
    plot_run(monitor, {}, {}, "a run", tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        pixels = np.array(image)  # height × width × RGBA
    assert pixels[0, 0, 3] == 0, "no background"
    assert pixels[pixels[..., 3] == 255][:, :3].max(-1).min() > 90, "nothing is black, which a dark page would hide"


@pytest.mark.exhaustive
def test_an_evaluation_after_the_last_interval_counts_and_ends_before_the_next_fit() -> None:
    clock, monitor = timed(warmup_batches=0)
    trainer = make_trainer(
        batches=plain_batches(3),
        callbacks=[monitor],
        eval_dataloader=two_batches(),
        eval_interval="5ba",  # longer than the run
    )
    clock.pass_during(trainer, "_eval_loop", 100.0)
    clock.pass_during(trainer.state.model, "forward", 0.25)
    trainer.fit()
    assert monitor.summary()["eval_seconds"] == pytest.approx(100 + 2 * 0.25)
    clock.now += 1000
    trainer.fit(duration="1ba")
    trainer.close()
    summary = monitor.summary()
    assert summary["eval_seconds"] == pytest.approx(2 * (100 + 2 * 0.25))
    assert summary["between_batches_seconds"] == 0
    assert summary["warmup_seconds"] == 0


def test_with_a_mask_of_pairs_of_tokens_every_position_counts() -> None:
    """It counted pairs as tokens, 16 for each, and reported a padding of -1025%."""
    masks = [inputs["attention_mask"] for inputs in plain_batches()]
    pairs: list[Any] = [mask[:, None, None, :].expand(4, 1, 16, 16).bool() for mask in masks]
    batches = [{**inputs, "attention_mask": mask} for inputs, mask in zip(plain_batches(), pairs, strict=True)]
    clock, monitor = timed(warmup_batches=0)
    fit_slowly(clock, 2.0, callbacks=[monitor], batches=batches)
    assert monitor.summary()["padding_fraction"] == 0
    assert monitor.summary()["tokens_per_sec"] == 4 * 16 / 2.0


@pytest.mark.parametrize("head", ["classification", "tokens", "mlm"])
def test_only_a_masked_lm_counts_the_vocabulary(head: Any) -> None:
    """A token classifier's labels are (B, S), too."""
    model = tiny_model("bert", head)
    labels = torch.zeros(2, 5, dtype=torch.int64) if head != "classification" else torch.zeros(2, dtype=torch.int64)
    outer: Any = torch.nn.Module()
    outer.model = model
    lengths = np.array([5, 3])
    counted = training_flops(model.config, lengths, "mlm" if head == "mlm" else "classification")
    assert flops_counter(outer)({"labels": labels}, lengths) == counted


def test_mfu_is_flops_divided_by_time_and_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all batches of the window, and of the run."""
    (clock, monitor), logger = timed(window=2, warmup_batches=0, interval=1), InMemoryLogger()
    monkeypatch.setattr(module, "device_peak", lambda *_: module.Peak(1e6, "fp32"))
    lengths = [[3, 4], [16, 9], [5, 5]]
    fit_slowly(clock, 2.0, batches=[batch(row) for row in lengths], callbacks=[monitor], loggers=[logger])
    one, two, three = (training_flops(tiny_bert().config, np.array(row), "classification") for row in lengths)
    of_windows = [one / 2, (one + two) / 4, (two + three) / 4]
    assert [v * 1e6 for _, v in logger.data["throughput/mfu"]] == pytest.approx(of_windows)
    assert monitor.summary()["mfu"] == pytest.approx((one + two + three) / 6 / 1e6)


def test_a_resumed_run_counts_its_first_batch_as_warm_up(tmp_path: Path) -> None:
    """Even without warm-up batches: the first batch waits while the dataloader skips the samples already trained on."""

    def train(until: int, **kwargs: Any) -> ThroughputMonitor:
        clock, monitor = timed(warmup_batches=1 if until == 4 else 0)
        seconds, duration = 0.5 if until == 4 else 2.0, f"{until}ba"
        fit_slowly(clock, seconds, batches=plain_batches(8), max_duration=duration, callbacks=[monitor], **kwargs)
        return monitor

    train(4, save_folder=str(tmp_path), **SAVING)
    resumed = train(7, load_path=str(tmp_path / "ba4.pt"))
    assert [b.steady for b in resumed.batches] == [False, True, True, True, False, True, True]
    assert resumed.summary()["warmup_seconds"] == pytest.approx(0.5 + 2.0)
    assert resumed.summary()["samples_per_sec"] == pytest.approx(5 * 4 / (3 * 0.5 + 2 * 2.0))


def test_a_run_shorter_than_its_warm_up_reports_a_rate_and_no_steady_batches(tmp_path: Path) -> None:
    monitor = ThroughputMonitor()
    trained(batches=plain_batches(2), callbacks=[monitor])
    assert monitor.summary()["samples_per_sec"] > 0
    assert monitor.summary()["steady_batches"] == 0
    plot_run(monitor, {}, {}, "a short run", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def emulated() -> list[Technique]:
    return [Float8Linear(emulate=True), MixedPrecision("bf16", allow_cpu=True)]


@pytest.mark.parametrize(
    ("build", "flag", "device", "expected"),
    [
        (list, "highest", "cpu", "fp32"),
        (list, "high", "cpu", "fp32"),  # a CPU has no TF32
        (list, "highest", "cuda", "fp32"),
        (list, "high", "cuda", "tf32"),
        (list, "medium", "cuda", "tf32"),
        (lambda: emulated()[1:], "highest", "cpu", "bf16"),
        (emulated, "highest", "cpu", "bf16"),  # emulated float8 multiplies in float32
    ],
)
def test_the_precision_in_force_is_the_matmuls_precision(
    build: Any, flag: Any, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_trainer(build()).state
    monkeypatch.setattr(precision, "device_of", lambda _: torch.device(device))
    torch.set_float32_matmul_precision(flag)
    assert precision_in_force(state) == expected


@pytest.mark.parametrize("technique", [Float8Linear(), FusedLayers(precision="fp8")])
def test_float8_has_its_own_peak_rate(technique: Technique) -> None:
    state = make_trainer(emulated()[1:]).state
    state.algorithms.append(technique)
    for engaged in (False, True):
        technique.engaged = engaged
        assert precision_in_force(state) == ("fp8" if engaged else "bf16")


def test_the_peak_rate_is_the_datasheets_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        precision, "get_gpu_flops_available", lambda state: {"bf16": 5e14}.get(state.precision.value, 0)
    )
    assert device_peak("bf16", torch.device("cpu")) is None
    assert device_peak("bf16", torch.device("cuda")) == (5e14, "bf16")
    assert device_peak("fp8", torch.device("cuda")) is None


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
    clock, monitor = timed(warmup_batches=2)
    queued: list[float] = []

    def wait(_: torch.device) -> None:
        clock.now += sum(queued)
        queued.clear()

    monkeypatch.setattr(module, "_synchronize", wait)
    trainer = make_trainer(
        batches=plain_batches(6), callbacks=[monitor], eval_dataloader=two_batches(), eval_interval="4ba"
    )
    forward = trainer.state.model.forward

    def launch(inputs: Any) -> Any:
        if trainer.state.model.training:
            clock.now += 0.05
            queued.append(0.2)
        return forward(inputs)

    trainer.state.model.forward = launch  # type: ignore[method-assign, assignment]
    fit_and_close(trainer)
    assert [b.step for b in monitor.batches] == pytest.approx([0.25, 0.25, 0.05, 0.45, 0.05, 0.45])
    summary = monitor.summary()
    assert summary["warmup_seconds"] == pytest.approx(0.5)
    assert summary["eval_seconds"] == 0
    assert summary["between_batches_seconds"] == 0, "the wait before the evaluation is part of the last step only"
    assert sum(b.between for b in monitor.batches) == pytest.approx(0)
    assert summary["samples_per_sec"] == pytest.approx(4 / 0.25)


class Queue:
    """A GPU that works 0.2 s on each of the host's batches, which take the host 0.05 s to launch."""

    def __init__(self, clock: Any) -> None:
        self.clock, self.free = clock, 0.0  # when the GPU will have finished

    def launch(self) -> None:
        self.clock.now += 0.05
        self.free = max(self.free, self.clock.now) + 0.2

    def wait(self, _: Any = None) -> None:
        self.clock.now = max(self.clock.now, self.free)

    def record(self) -> Any:
        reached = max(self.clock.now, self.free)
        return SimpleNamespace(at=reached, elapsed_time=lambda later: 1e3 * (later.at - reached))


@pytest.mark.parametrize("captures", [[], [4], [3, 5]])
def test_what_the_gpu_still_has_to_do_before_a_capture_counts_for_the_steady_batches(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, monitor = timed(warmup_batches=1)
    gpu = Queue(clock)
    monkeypatch.setattr(module, "_synchronize", gpu.wait)
    monkeypatch.setattr(module, "_recorder", lambda _: gpu.record)
    trainer = make_trainer(batches=plain_batches(8), callbacks=[monitor])
    forward, batches = trainer.state.model.forward, []

    def launch(inputs: Any) -> Any:
        batches.append(inputs)
        if len(batches) in captures:
            gpu.wait()
            clock.now += 3.0
            count_capture()
        gpu.launch()
        return forward(inputs)

    trainer.state.model.forward = launch  # type: ignore[method-assign, assignment]
    fit_and_close(trainer)
    assert [b.steady for b in monitor.batches] == [i not in (1, *captures) for i in range(1, 9)]
    runs = [len([*group]) for steady, group in itertools.groupby(b.steady for b in monitor.batches) if steady]
    seconds = sum(0.05 + 0.2 * batches for batches in runs)  # the GPU waits for the first launch of each
    assert monitor.summary()["samples_per_sec"] == pytest.approx(4 * sum(runs) / seconds)
    assert [b.step for b in monitor.batches if b.index in captures] == pytest.approx([3.25] * len(captures))


def one_rank_captures() -> tuple[dict[str, Any], list[bool]]:
    """Train with batches of 0.5 s, and return the summary and whether each batch was in steady state.

    Rank 1 captures a graph for 3 s in the third batch, and rank 0 waits for it. Each batch's data takes rank 0 0.25 s
    and rank 1 0.75 s. After each batch, rank 0 is busy for 0.125 s and rank 1 for 0.375 s.
    """
    clock, monitor = timed(warmup_batches=1)
    module.device_peak = lambda *_: module.Peak(1e6, "fp32")  # not restored: the process ends with this function
    trainer = make_trainer(batches=plain_batches(5), callbacks=[monitor])
    forward, after, saving = trainer.state.model.forward, monitor.after_dataloader, monitor.batch_checkpoint

    def capture(inputs: Any) -> Any:
        captures = trainer.state.timestamp.batch.value == 2
        if captures and dist.get_global_rank():
            count_capture()
        clock.now += 3.5 if captures else 0.5
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
    fit_and_close(trainer)
    return monitor.summary(), [b.steady for b in monitor.batches]


def test_a_capture_on_one_rank_counts_as_warm_up_on_every_rank() -> None:
    flops = training_flops(tiny_bert().config, np.array([12, 7, 16, 10]), "classification")
    waited, ranks = (0.25 + 0.75) / 2, on_ranks(one_rank_captures)
    for summary, steady in ranks:
        assert steady == [False, True, False, True, True]
        assert summary["samples_per_sec"] == pytest.approx(2 * 4 / (0.5 + waited))
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
    monkeypatch.setattr(module, "graphs_so_far", partial(next, itertools.count()))
    logger = InMemoryLogger()
    trained(batches=plain_batches(12), callbacks=[ThroughputMonitor(warmup_batches=8)], loggers=[logger])
    assert [t.batch.value for t, _ in logger.data["throughput/samples_per_sec"]] == [9, 12], "and at the end"
