"""fp16: the gradient scaler's skipped steps are counted and distinguished from NaN losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from composer.core import Precision

from composer_speedups.callbacks.finite_loss import FiniteLoss
from composer_speedups.callbacks.loss_scale import LossScaleMonitor
from composer_speedups.core.errors import RunFailedError
from tests.callbacks.test_finite_loss import Snapshots
from tests.helpers.common import make_trainer, trained
from tests.helpers.nonfinite import Poisoned, batches

on_both = pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")  # of the scaler's


def fp16_trainer(gpu: bool, **settings: Any) -> Any:
    """Return a Trainer in fp16. On the CPU, it runs Composer's loop and torch's GradScaler without autocast."""
    trainer = make_trainer(gpu=gpu, **{"precision": "amp_fp16"} if gpu else {}, **settings)
    if not gpu:
        trainer.state.precision = Precision.AMP_FP16
        trainer.state.scaler = torch.amp.GradScaler("cpu")
    return trainer


@on_both
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_skipped_by_the_scaler_and_does_not_stop_the_run(fused: bool, gpu: bool) -> None:
    model = Poisoned(overflow=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    guard, monitor, snapshots = FiniteLoss("skip"), LossScaleMonitor(), Snapshots()
    callbacks = [guard, monitor, snapshots]
    trainer = fp16_trainer(gpu, model=model, batches=batches(6, 3, 5), optimizer=optimizer, callbacks=callbacks)
    trainer.fit()
    trainer.close()
    assert monitor.summary() == {"loss_scale": 2.0**14, "loss_scale_skips": 2}
    assert guard.summary() == {"nonfinite_losses": 0, "skipped_steps": 0}
    assert snapshots.unchanged.count(True) == 2
    assert gpu or snapshots.unchanged == [False, False, True, False, True, False]
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    logger: Any = trainer.logger.destinations[0]
    assert [float(v) for _, v in logger.data["numerics/loss_scale"]] == [2**16, 2**16, 2**15, 2**15, 2**14, 2**14]


@on_both
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_nonfinite_loss_is_not_counted_as_an_overflow(on_nonfinite: Any, gpu: bool) -> None:
    guard = FiniteLoss(on_nonfinite)
    trainer = fp16_trainer(gpu, model=Poisoned(), batches=batches(6, 3), callbacks=[guard, LossScaleMonitor()])
    if on_nonfinite == "stop":
        with pytest.raises(RunFailedError, match=r"loss: nan at step 3 .*amp_fp16"):
            trainer.fit()
    else:
        trainer.fit()
        assert guard.summary() == {"nonfinite_losses": 1, "skipped_steps": 1}
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    trainer.close()


@on_both
def test_gradients_that_overflow_at_any_scale_stop_the_run(gpu: bool) -> None:
    poisoned, callbacks = batches(60, *range(2, 61)), [FiniteLoss(), LossScaleMonitor()]
    trainer = fp16_trainer(gpu, model=Poisoned(overflow=True), batches=poisoned, callbacks=callbacks)
    with pytest.raises(RunFailedError, match=r"loss scale: 6.1e-05 .*after 30 steps whose gradients overflowed"):
        trainer.fit()
    trainer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_skipping_works_with_cuda_graphs_and_early_loss(graphs: bool) -> None:
    from composer_speedups import CUDAGraphs, EarlyLoss, SDPAAttention

    algorithms = [SDPAAttention(), CUDAGraphs(), EarlyLoss()] if graphs else [EarlyLoss()]
    guard, snapshots, model = FiniteLoss("skip"), Snapshots(), Poisoned()
    plain = type(model).loss

    def loss(self: Any, outputs: Any, batch: Any) -> Any:  # runs outside the captured forward pass
        return plain(self, outputs, batch)

    model.loss = loss.__get__(model)  # type: ignore[method-assign]
    trained(algorithms, model=model, batches=batches(6, 4), callbacks=[guard, snapshots], gpu=True)
    assert snapshots.unchanged == [False, False, False, True, False, False]
    assert guard.summary() == {"nonfinite_losses": 1, "skipped_steps": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_the_callbacks_add_no_gpu_synchronizations(on_nonfinite: Any) -> None:
    """torch's sync debug mode counts as many synchronizations as without the callbacks."""

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

    without, with_it = synchronizations([]), synchronizations([FiniteLoss(on_nonfinite), LossScaleMonitor()])
    assert without > 0
    assert with_it - without <= 2, "the check of the weights at the end of the run"
    assert math.isfinite(with_it)
