"""LossMonitor: NaN and infinite losses, divergence, fp16's loss scale, and what it logs and records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback, Event, Precision, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from composer.optim import LinearWithWarmupScheduler
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups import LossMonitor
from composer_speedups.callbacks.config import DivergenceConfig, FiniteLossConfig
from composer_speedups.core.errors import RunFailedError
from composer_speedups.core.registry import technique_class
from composer_speedups.distributed.fsdp import GradientClipping
from tests.helpers.common import fit_and_close, make_trainer, microbatches, plain_batches, tiny_bert, trained
from tests.helpers.nonfinite import Poisoned, batches

on_both = pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
scaled = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")  # of the scaler's


def skipping(max_skips: int = 10) -> LossMonitor:
    return LossMonitor(FiniteLossConfig("skip", max_skips))


def counts(monitor: LossMonitor) -> tuple[int, int]:
    summary = monitor.summary()
    return summary["nonfinite_losses"], summary["skipped_steps"]


def logged(trainer: Any, name: str) -> list[float]:
    return [float(value) for _, value in trainer.logger.destinations[0].data[name]]


class Snapshots(Callback):
    """Record for each batch whether it left the weights and the optimizer state unchanged."""

    def __init__(self) -> None:
        self.unchanged: list[bool] = []
        self._before: Any = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_START:
            self._before = self._take(state)
        elif event == Event.BATCH_END:
            after = self._take(state)
            assert len(after) == len(self._before) or not self.unchanged, "only the first step creates optimizer state"
            same = len(after) == len(self._before)
            self.unchanged.append(same and all(_equal(a, b) for a, b in zip(after, self._before, strict=True)))

    @staticmethod
    def _take(state: State) -> list[Any]:
        (optimizer,) = state.optimizers
        entries = [value for entry in optimizer.state.values() for _, value in sorted(entry.items())]
        return [_copy(value) for value in [*state.model.parameters(), *entries]]


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dequantize() if hasattr(value, "codes") else value.detach().clone()  # torchao's cannot be cloned


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.pins
def test_a_nonfinite_loss_stops_the_run_before_its_weights_are_saved(value: float) -> None:
    technique = technique_class("fused_optimizer")()
    trainer = make_trainer(
        [technique],
        model=Poisoned(value),
        batches=batches(6, 4),
        callbacks=[LossMonitor()],
        save_folder="saved",
        save_interval="1ba",
        save_num_checkpoints_to_keep=1,
    )
    with pytest.raises(RunFailedError) as error:
        trainer.fit()
    said = str(error.value)
    assert said.startswith(f"loss: {value} at step 4 (batch 4 of epoch 1), next learning rate 0.001, fp32, ")
    assert "engaged techniques: fused_optimizer; not finite: 41 of 41 gradients, model.bert" in said
    assert "resume from saved/ep0-ba3-rank0.pt with checkpoint.weights_only=true and a lower optimizer.lr" in said
    kept = torch.load(next(p for p in Path("saved").glob("ep*.pt")), weights_only=False)["state"]["model"]
    assert all(weight.isfinite().all() for weight in kept.values())
    trainer.close()


OPTIMIZERS = {
    "": {},
    "foreach_optimizer": {},
    "fused_optimizer": {},
    "adafactor": {},
    "bnb_optimizer": {"bits": 8, "min_8bit_size": 1024},
    "lowbit_optimizer": {"min_size": 1024},
    "kahan_optimizer": {},
    "offloaded_optimizer": {"allow_cpu": True},
    "sharded_optimizer": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.pins
def test_a_skipped_batch_changes_no_weights_and_no_optimizer_state(name: str) -> None:
    algorithms = [technique_class(name)(**OPTIMIZERS[name])] if name else []
    guard, snapshots = skipping(), Snapshots()
    trainer = trained(algorithms, model=Poisoned(), batches=batches(6, 3, 5), callbacks=[guard, snapshots])
    assert snapshots.unchanged == [False, False, True, False, True, False]
    assert counts(guard) == (2, 2)
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    assert logged(trainer, "numerics/skipped_steps") == [1, 2, 2]


def test_skipped_batches_are_counted_across_a_resume() -> None:
    """The first batch of the resumed run is skipped, too."""
    whole, resumed = skipping(), skipping()
    settings: dict[str, Any] = {"model": Poisoned(), "batches": batches(6, 3, 5)}
    trained(callbacks=[whole], save_folder="saved", save_interval="4ba", **settings)
    trained(callbacks=[resumed], load_path="saved/ep0-ba4-rank0.pt", **settings)
    assert counts(resumed) == counts(whole) == (2, 2)


def test_a_nonfinite_microbatch_skips_the_whole_batch() -> None:
    given = batches(4)
    given[2]["input_ids"][2, 0] = 63  # the first row of the second micro-batch
    guard, snapshots = skipping(), Snapshots()
    trained(model=Poisoned(), callbacks=[guard, snapshots], **microbatches(given, 2))
    assert snapshots.unchanged == [False, False, True, False]


CLASSIFIER = r"classifier\.bias first are not finite"
STOPS: list[tuple[Any, bool, tuple[int, ...], str, str]] = [
    (
        partial(skipping, 2),
        False,
        (2, 4, 5, 6),
        "",
        r"at step 6 .*2 batches in a row were skipped before it .*max_skips",
    ),
    (skipping, False, (1,), "", r"at step 1 .*the first batch is never skipped"),
    (LossMonitor, True, (4,), "2ba", rf"weights: 1 of 41 weights, model\.{CLASSIFIER} at a scheduled checkpoint"),
    (skipping, True, (4,), "2ba", rf"weights: 1 of 41 weights, model\.{CLASSIFIER} at a scheduled checkpoint"),
    (LossMonitor, True, (8,), "", rf"weights: .*{CLASSIFIER} at the end of the run"),
    (skipping, True, (2,), "", rf"loss: nan at step 3 .*{CLASSIFIER}"),
]


@pytest.mark.parametrize(("monitor", "overflow", "bad", "saves", "said"), STOPS)
def test_a_run_that_cannot_skip_stops_and_saves_no_such_weights(
    monitor: Any, overflow: bool, bad: tuple[int, ...], saves: str, said: str
) -> None:
    saving: dict[str, Any] = {"save_folder": "saved", "save_interval": saves} if saves else {}
    model = Poisoned(overflow=overflow)
    trainer = make_trainer(model=model, batches=batches(8, *bad), callbacks=[monitor()], **saving)
    with pytest.raises(RunFailedError, match=said):
        trainer.fit()
    assert [p.name for p in Path("saved").glob("ep*.pt")] == (["ep0-ba2-rank0.pt"] if saves else [])


def test_nonfinite_weights_on_another_rank_stop_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_speedups.callbacks.losses.any_rank", lambda *_: True)
    trainer = make_trainer(callbacks=[LossMonitor()])
    with pytest.raises(RunFailedError, match="weights: another rank's weights"):
        trainer.fit(duration="1ba")
    trainer.close()


def climbing(monitor: LossMonitor, until: int = 12, **settings: Any) -> Any:
    """Return a Trainer of 12 batches whose loss is 4 times as large in batches 7 to ``until``."""
    given: dict[str, Any] = {"save_interval": "1ba", "save_num_checkpoints_to_keep": 1, "save_overwrite": True}
    poisoned = batches(12, *range(7, until + 1))
    return make_trainer(
        model=Poisoned(4.0), batches=poisoned, callbacks=[monitor], save_folder="saved", **given, **settings
    )


def diverging(batches: int = 3) -> LossMonitor:
    return LossMonitor(divergence=DivergenceConfig(factor=2, margin=0, batches=batches, smoothing=0.5))


def test_a_rising_loss_stops_the_run_and_keeps_the_last_good_checkpoint() -> None:
    monitor, again = diverging(), diverging()
    with pytest.raises(RunFailedError, match=r"diverged at step 9 .*resume from saved/ep0-ba6-rank0\.pt"):
        climbing(monitor).fit()
    assert [p.name for p in Path("saved").glob("ep*.pt")] == ["ep0-ba6-rank0.pt"]
    assert monitor.summary()["checkpoints_withheld"] == 2
    resumed = climbing(again, load_path="saved/ep0-ba6-rank0.pt")
    assert again.reference == monitor.reference
    with pytest.raises(RunFailedError, match="diverged at step 9 "):
        resumed.fit()
    assert again.losses == monitor.losses


def test_a_loss_that_recovers_does_not_stop_the_run() -> None:
    monitor = diverging(5)
    fit_and_close(climbing(monitor, until=8))
    assert monitor.summary()["checkpoints_withheld"] == 3
    assert [*monitor.losses] == [*range(1, 13)]


class Scripted(Poisoned):
    """Its loss takes these values in turn."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self.values = iter(values)

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss = super().loss(outputs, batch)
        return loss + (next(self.values) - loss).detach()


def scripted(values: Sequence[float], settings: DivergenceConfig, **others: Any) -> LossMonitor:
    monitor = LossMonitor(FiniteLossConfig("skip"), settings, interval=1)
    trained(model=Scripted(values), batches=batches(len(values)), callbacks=[monitor], **others)
    return monitor


def test_the_smoothed_loss_is_the_weighted_mean_of_the_losses() -> None:
    """Several losses of a batch are summed; NaN is ignored."""
    monitor = scripted((4.0, 8.0, math.nan, 2.0), DivergenceConfig(smoothing=0.75))
    weights = torch.tensor([0.75**2, 0.75, 1.0])
    expected = float((weights * torch.tensor([4.0, 8.0, 2.0])).sum() / weights.sum())
    assert monitor.smoothed == pytest.approx(expected)
    assert [monitor.losses[batch] for batch in (1, 2, 4)] == [4.0, 8.0, 2.0]


@pytest.mark.parametrize(
    ("values", "saved", "reference"),
    [((4.0, 1.0, 1.5), "2ba", 1.0), ((4.0, 5.0, 6.0), "9ba", 4.0)],
    ids=["the last good checkpoint", "the start"],
)
def test_the_reference_is_the_loss_at_the_last_good_checkpoint_or_at_the_start(
    values: tuple[float, ...], saved: str, reference: float
) -> None:
    """A loss equal to the limit is allowed."""
    settings = DivergenceConfig(factor=1.5, margin=1e-4, batches=1, smoothing=0.0)
    above = (*values, values[-1] + 1e-2)
    with pytest.raises(RunFailedError, match=rf"at step 4 .*above {1.5 * reference:g}; .* and was {reference:g} "):
        scripted(above, settings, save_folder="saved", save_interval=saved)


class Steps(Callback):
    """Records the learning rate and the gradient norm that the optimizer sees in each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))


@pytest.mark.parametrize("threshold", [1e6, 1e-3, None])
@pytest.mark.parametrize("interval", [1, 3])
def test_learning_rate_and_gradient_norm_are_logged_at_an_interval(threshold: float | None, interval: int) -> None:
    """The norm is that before clipping; without clipping, none is computed."""
    clipping: list[Any] = [] if threshold is None else [GradientClipping("norm", clipping_threshold=threshold)]
    steps = Steps()
    trainer = trained(
        clipping,
        batches=plain_batches(7),
        callbacks=[steps, LossMonitor(interval=interval)],
        schedulers=LinearWithWarmupScheduler("3ba"),
    )
    at = [batch for batch in range(7) if batch in (0, 6) or not (batch + 1) % interval]
    assert logged(trainer, "optimizer/learning_rate") == [steps.rates[batch] for batch in at]
    assert len(set(steps.rates)) > 3, "the schedule changes it"
    if threshold is None:
        assert "optimizer/gradient_norm" not in trainer.logger.destinations[0].data  # type: ignore[attr-defined]
        return
    norms = logged(trainer, "optimizer/gradient_norm")
    assert len(norms) == len(at)
    if threshold == 1e6:  # nothing is clipped
        torch.testing.assert_close(norms, [steps.norms[batch] for batch in at])
    else:
        assert min(norms) > 100 * max(steps.norms)


@pytest.mark.parametrize("fits", [1, 2])
def test_training_metrics_are_computed_for_logged_batches_only_and_equal_composers(fits: int) -> None:
    def values(**settings: Any) -> dict[int, float]:
        metrics: Any = [MulticlassAccuracy(num_classes=2, average="micro")]
        model = HuggingFaceModel(tiny_bert(), use_logits=True, metrics=metrics)
        monitor = LossMonitor(interval=3, **settings)
        trainer = make_trainer(model=model, batches=plain_batches(8), callbacks=[monitor], max_duration="4ba")
        for _ in range(fits):
            trainer.fit(duration="4ba")
            last = float(trainer.state.train_metrics["MulticlassAccuracy"].compute())  # type: ignore[index]
        trainer.close()
        data = trainer.logger.destinations[0].data  # type: ignore[attr-defined]
        logged = {time.batch.value + 1: float(value) for time, value in data["metrics/train/MulticlassAccuracy"]}
        logged.pop(9, None)  # Composer logs the last value again at the end of the epoch
        assert last == logged[4 * fits]
        return logged

    every, some = values(), values(metrics_at_interval=True)
    assert [*every] == [*range(1, 4 * fits + 1)]
    assert some == {batch: every[batch] for batch in ([1, 3, 4] if fits == 1 else [1, 3, 4, 6, 8])}
    assert len(set(some.values())) > 1


# fp16


def fp16_trainer(gpu: bool, **settings: Any) -> Any:
    """Return a Trainer in fp16. On the CPU, it runs Composer's loop and torch's GradScaler without autocast."""
    trainer = make_trainer(gpu=gpu, **{"precision": "amp_fp16"} if gpu else {}, **settings)
    if not gpu:
        trainer.state.precision = Precision.AMP_FP16
        trainer.state.scaler = torch.amp.GradScaler("cpu")
    return trainer


@on_both
@scaled
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_skipped_by_the_scaler_and_does_not_stop_the_run(fused: bool, gpu: bool) -> None:
    model = Poisoned(overflow=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    monitor, snapshots = LossMonitor(FiniteLossConfig("skip"), interval=1), Snapshots()
    callbacks = [monitor, snapshots]
    trainer = fp16_trainer(gpu, model=model, batches=batches(6, 3, 5), optimizer=optimizer, callbacks=callbacks)
    fit_and_close(trainer)
    assert monitor.summary() == {"nonfinite_losses": 0, "skipped_steps": 0, "loss_scale": 2.0**14}
    assert snapshots.unchanged.count(True) == 2
    assert gpu or snapshots.unchanged == [False, False, True, False, True, False]
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    assert logged(trainer, "numerics/loss_scale") == [2**16, 2**16, 2**15, 2**15, 2**14, 2**14]


@on_both
@scaled
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_nonfinite_loss_is_not_counted_as_an_overflow(on_nonfinite: Any, gpu: bool) -> None:
    monitor = LossMonitor(FiniteLossConfig(on_nonfinite))
    trainer = fp16_trainer(gpu, model=Poisoned(), batches=batches(6, 3), callbacks=[monitor])
    if on_nonfinite == "stop":
        with pytest.raises(RunFailedError, match=r"loss: nan at step 3 .*amp_fp16"):
            trainer.fit()
    else:
        trainer.fit()
        assert counts(monitor) == (1, 1)
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    trainer.close()


@on_both
@scaled
def test_gradients_that_overflow_at_any_scale_stop_the_run(gpu: bool) -> None:
    """The scale falls below 1e-4 after 30 overflows, and is read after every tenth batch."""
    poisoned = batches(60, *range(2, 61))
    trainer = fp16_trainer(gpu, model=Poisoned(overflow=True), batches=poisoned, callbacks=[LossMonitor()])
    with pytest.raises(RunFailedError, match=r"loss scale: 1.19e-07 .*gradients overflow at any scale"):
        fit_and_close(trainer)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_skipping_works_with_cuda_graphs_and_early_loss(graphs: bool) -> None:
    from composer_speedups import CUDAGraphs, EarlyLoss, SDPAAttention

    algorithms = [SDPAAttention(), CUDAGraphs(), EarlyLoss()] if graphs else [EarlyLoss()]
    monitor, snapshots, model = skipping(), Snapshots(), Poisoned()
    plain = type(model).loss

    def loss(self: Any, outputs: Any, batch: Any) -> Any:  # runs outside the captured forward pass
        return plain(self, outputs, batch)

    model.loss = loss.__get__(model)  # type: ignore[method-assign]
    trained(algorithms, model=model, batches=batches(6, 4), callbacks=[monitor, snapshots], gpu=True)
    assert snapshots.unchanged == [False, False, False, True, False, False]
    assert counts(monitor) == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_the_monitor_adds_no_gpu_synchronizations(on_nonfinite: Any) -> None:
    """torch's sync debug mode counts as many synchronizations as without the callback."""

    def synchronizations(callbacks: list[Any]) -> int:
        import warnings

        trainer = make_trainer(batches=batches(8), callbacks=callbacks, gpu=True)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                trainer.fit()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        trainer.close()
        return sum("synchroniz" in str(w.message) for w in caught)

    without = synchronizations([])
    with_it = synchronizations([LossMonitor(FiniteLossConfig(on_nonfinite))])
    assert without > 0
    assert with_it - without <= 2, "the check of the weights at the end of the run"
