"""NaN and infinite losses: the run stops, or skips the batch without changing weights or optimizer state."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Callback, Event, State, Timestamp
from composer.loggers import Logger
from composer.optim import LinearWithWarmupScheduler

from composer_speedups.callbacks.divergence import DivergenceGuard
from composer_speedups.callbacks.finite_loss import FiniteLoss
from composer_speedups.core.errors import RunFailedError
from composer_speedups.core.registry import technique_class
from tests.helpers.common import make_trainer, trained
from tests.helpers.nonfinite import Poisoned, batches
from tests.helpers.rerun import graphed


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
        callbacks=[FiniteLoss()],
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


def test_without_the_callback_the_same_run_ends_with_nonfinite_weights() -> None:
    trainer = trained(model=Poisoned(), batches=batches(6, 4))
    assert not any(p.isfinite().all() for p in trainer.state.model.parameters())


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
def test_a_skipped_batch_changes_no_weights_and_no_optimizer_state(name: str, caplog: pytest.LogCaptureFixture) -> None:
    algorithms = [technique_class(name)(**OPTIMIZERS[name])] if name else []
    guard, snapshots = FiniteLoss("skip"), Snapshots()
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        trainer = trained(
            algorithms, model=Poisoned(), batches=batches(6, 3, 5), callbacks=[guard, snapshots], max_duration="6ba"
        )
    assert snapshots.unchanged == [False, False, True, False, True, False]
    assert guard.summary() == {"nonfinite_losses": 2, "skipped_steps": 2}
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    assert caplog.text.count("the batch is skipped") == 2
    logger: Any = trainer.logger.destinations[0]
    assert [float(value) for _, value in logger.data["numerics/skipped_steps"]] == [1, 2, 2]


SWAPPED = [name for name in OPTIMIZERS if name not in ("", "foreach_optimizer", "fused_optimizer")]


@pytest.mark.parametrize("name", SWAPPED)
def test_an_optimizer_engages_although_its_first_steps_are_skipped(name: str) -> None:
    """The optimizer's first step with a nonzero learning rate is the one that FiniteLoss skips."""
    technique: Any = technique_class(name)(**OPTIMIZERS[name])
    trained(
        [technique],
        model=Poisoned(),
        batches=batches(4, 3),  # the learning rate is 0 in the first two batches
        callbacks=[FiniteLoss("skip")],
        schedulers=LinearWithWarmupScheduler("1ba"),
    )
    assert technique.engaged
    moved = technique.evidence["parameters_moved"].split()
    assert int(moved[0]) > 0
    assert moved[-1] == "41"


def test_a_nonfinite_microbatch_skips_the_whole_batch() -> None:
    def split(batch: Any, size: Any) -> list[Any]:
        return [{key: value[i : i + size] for key, value in batch.items()} for i in range(0, 4, size)]

    given = batches(4)
    given[2]["input_ids"][2, 0] = 63  # the first row of the second micro-batch
    guard, snapshots = FiniteLoss("skip"), Snapshots()
    trainer = make_trainer(
        model=Poisoned(), batches=given, callbacks=[guard, snapshots], device_train_microbatch_size=2
    )
    trainer.state._train_dataloader = trainer.state.train_dataloader
    trainer._train_data_spec.split_batch = split
    trainer.fit()
    trainer.close()
    assert snapshots.unchanged == [False, False, True, False]


def test_a_batch_replayed_by_a_graph_is_skipped_too() -> None:
    model, guard, snapshots = Poisoned(), FiniteLoss("skip"), Snapshots()
    calls = graphed(model.model)
    trained(model=model, batches=batches(5, 4), callbacks=[guard, snapshots])
    assert calls.replays == 5
    assert snapshots.unchanged == [False, False, False, True, False]


def test_skip_stops_at_max_skips_in_a_row_and_at_the_first_batch() -> None:
    trainer = make_trainer(model=Poisoned(), batches=batches(8, 2, 4, 5, 6), callbacks=[FiniteLoss("skip", 2)])
    with pytest.raises(RunFailedError, match=r"at step 6 .*2 batches in a row were skipped before it .*max_skips"):
        trainer.fit()
    trainer = make_trainer(model=Poisoned(), batches=batches(8, 1), callbacks=[FiniteLoss("skip")])
    with pytest.raises(RunFailedError, match=r"at step 1 .*the first batch is never skipped"):
        trainer.fit()


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_nonfinite_weights_are_named_and_never_saved(on_nonfinite: Any) -> None:
    given: dict[str, Any] = {"save_folder": "saved", "save_interval": "2ba"}
    trainer = make_trainer(
        model=Poisoned(overflow=True), batches=batches(4, 4), callbacks=[FiniteLoss(on_nonfinite)], **given
    )
    with pytest.raises(RunFailedError, match=r"weights: 1 of 41 weights, model\.classifier\.bias first are not fin"):
        trainer.fit()
    assert [p.name for p in Path("saved").glob("ep*.pt")] == ["ep0-ba2-rank0.pt"]
    trainer = make_trainer(model=Poisoned(overflow=True), batches=batches(4, 4), callbacks=[FiniteLoss(on_nonfinite)])
    with pytest.raises(RunFailedError, match=r"classifier\.bias first are not finite at the end of the run"):
        trainer.fit()
    trainer = make_trainer(model=Poisoned(overflow=True), batches=batches(4, 2), callbacks=[FiniteLoss("skip")])
    with pytest.raises(RunFailedError, match=r"loss: nan at step 3 .*classifier\.bias first are not finite"):
        trainer.fit()


def test_a_rising_loss_stops_the_run_and_keeps_the_last_good_checkpoint() -> None:
    trainer = _climbing(DivergenceGuard(factor=2, margin=0, batches=3, smoothing=0.5))
    with pytest.raises(RunFailedError) as error:
        trainer.fit()
    assert "diverged at step 9 " in str(error.value)
    assert "resume from saved/ep0-ba6-rank0.pt" in str(error.value)
    assert [p.name for p in Path("saved").glob("ep*.pt")] == ["ep0-ba6-rank0.pt"]
    (guard,) = (c for c in trainer.state.callbacks if isinstance(c, DivergenceGuard))
    assert guard.summary()["checkpoints_withheld"] == 2
    resumed = _climbing(DivergenceGuard(2, 0, 3, 0.5), load_path="saved/ep0-ba6-rank0.pt")
    (again,) = (c for c in resumed.state.callbacks if isinstance(c, DivergenceGuard))
    assert again.reference == pytest.approx(guard.reference)
    with pytest.raises(RunFailedError, match="diverged at step 9 "):
        resumed.fit()


def test_a_loss_that_recovers_does_not_stop_the_run() -> None:
    trainer = _climbing(DivergenceGuard(factor=2, margin=0, batches=5, smoothing=0.5), until=8)
    trainer.fit()
    trainer.close()
    (guard,) = (c for c in trainer.state.callbacks if isinstance(c, DivergenceGuard))
    assert guard.summary()["checkpoints_withheld"] == 3
    assert trainer.state.timestamp.batch.value == 12


def test_the_reference_is_the_loss_at_the_last_good_checkpoint() -> None:
    """The loss falls, a checkpoint is written, and the loss climbs back to its first value."""
    guard = DivergenceGuard(factor=1.5, margin=0.0, batches=1, smoothing=0.0)
    state: Any = SimpleNamespace(
        callbacks=[], load_path=None, previous_timestamp=None, optimizers=[], algorithms=[],
        timestamp=Timestamp(), precision=SimpleNamespace(value="fp32"), total_loss_dict={},
    )  # fmt: skip
    logger: Any = SimpleNamespace(log_metrics=lambda _: None)
    for loss in (4.0, 1.0):
        state.total_loss_dict = {"loss/train/total": loss}
        guard.batch_end(state, logger)
    assert guard.reference == 4.0
    assert guard._may_save(state, Event.BATCH_CHECKPOINT)
    assert guard.reference == guard.summary()["loss_at_last_good_checkpoint"] == 1.0
    state.total_loss_dict = {"loss/train/total": 1.5}
    guard.batch_end(state, logger)  # equal to the limit, which is allowed
    state.total_loss_dict = {"loss/train/total": 4.0}
    with pytest.raises(RunFailedError, match=r"above 1\.5; it is 4 and was 1 "):
        guard.batch_end(state, logger)


def test_the_smoothed_loss_is_the_weighted_mean_of_the_losses() -> None:
    guard = DivergenceGuard(smoothing=0.75)
    logged: list[dict[str, float]] = []
    logger: Any = SimpleNamespace(log_metrics=logged.append)
    for loss in (4.0, 8.0, math.nan, 2.0):  # NaN is ignored
        guard.batch_end(SimpleNamespace(total_loss_dict={"loss/train/total": loss}), logger)  # type: ignore[arg-type]
    weights = [0.75**2, 0.75, 1.0]
    expected = sum(w * v for w, v in zip(weights, (4.0, 8.0, 2.0), strict=True)) / sum(weights)
    assert guard.smoothed == pytest.approx(expected)
    assert [metrics["numerics/smoothed_loss"] for metrics in logged] == pytest.approx(
        [4.0, (0.75 * 4 + 8) / 1.75, expected]
    )


def test_a_checkpoint_before_enough_batches_sets_no_reference() -> None:
    guard = DivergenceGuard(batches=1, smoothing=0.9)
    state: Any = SimpleNamespace(total_loss_dict={"loss/train/total": 3.0})
    guard.batch_end(state, SimpleNamespace(log_metrics=lambda _: None))  # type: ignore[arg-type]
    assert guard._may_save(state, Event.BATCH_CHECKPOINT)
    assert guard.reference is None


def test_nonfinite_weights_on_another_rank_stop_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def elsewhere(_: State, here: bool) -> bool:
        asked.append(here)
        return True

    guard = FiniteLoss()
    trainer = make_trainer(callbacks=[guard])
    monkeypatch.setattr("composer_speedups.callbacks.finite_loss.any_rank", elsewhere)
    with pytest.raises(RunFailedError, match="weights: another rank's weights are not finite"):
        guard._check_weights(trainer.state, "now")
    with torch.no_grad():
        next(trainer.state.model.parameters()).fill_(math.nan)
    with pytest.raises(RunFailedError, match=r"weights: 1 of \d+ weights, "):
        guard._check_weights(trainer.state, "now")
    assert asked == [False, True]
    monkeypatch.setattr("composer_speedups.callbacks.finite_loss.any_rank", lambda _, here: here)
    with torch.no_grad():
        next(trainer.state.model.parameters()).fill_(1.0)
    guard._check_weights(trainer.state, "now")


def _climbing(guard: DivergenceGuard, until: int = 12, **kwargs: Any) -> Any:
    return make_trainer(
        model=Poisoned(4.0),
        batches=batches(12, *range(7, until + 1)),
        callbacks=[FiniteLoss(), guard],
        optimizer=None,
        save_folder="saved",
        save_interval="1ba",
        save_num_checkpoints_to_keep=1,
        save_overwrite=True,
        **kwargs,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FiniteLoss("go on"),  # type: ignore[arg-type]
        lambda: FiniteLoss(max_skips=0),
        lambda: DivergenceGuard(factor=0.5),
        lambda: DivergenceGuard(smoothing=1.0),
        lambda: DivergenceGuard(batches=0),
    ],
)
def test_settings_out_of_range_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        wrong()
