"""fp16: the gradient scaler's skipped steps are counted and distinguished from NaN losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from composer.core import Precision

from composer_speedups.callbacks.finite_loss import FiniteLoss
from composer_speedups.callbacks.loss_scale import LossScaleMonitor
from composer_speedups.core.errors import NonFiniteError
from tests.callbacks.test_finite_loss import Snapshots
from tests.helpers.common import make_trainer, trained
from tests.helpers.nonfinite import Poisoned, batches

HALF: dict[str, Any] = {"gpu": True, "precision": "amp_fp16"}


def _scaled_on_cpu(model: Any, train_batches: Any, callbacks: list[Any]) -> Any:
    """Return a Trainer that runs Composer's fp16 loop and torch's GradScaler on the CPU, without autocast."""
    trainer = make_trainer(model=model, batches=train_batches, callbacks=callbacks)
    trainer.state.precision = Precision.AMP_FP16
    trainer.state.scaler = torch.amp.GradScaler("cpu")
    return trainer


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")
def test_skips_of_the_scaler_are_counted_on_a_cpu() -> None:
    guard, monitor, snapshots = FiniteLoss("skip"), LossScaleMonitor(), Snapshots()
    model = Poisoned(overflow=True)
    trainer = _scaled_on_cpu(model, batches(6, 3, 5), [guard, monitor, snapshots])
    trainer.fit()
    assert monitor.summary() == {"loss_scale": 2.0**14, "loss_scale_skips": 2}
    assert guard.summary() == {"nonfinite_losses": 0, "skipped_steps": 0}
    assert snapshots.unchanged == [False, False, True, False, True, False]
    logger: Any = trainer.logger.destinations[0]
    assert [float(v) for _, v in logger.data["numerics/loss_scale"]] == [2**16, 2**16, 2**15, 2**15, 2**14, 2**14]
    trainer = _scaled_on_cpu(Poisoned(), batches(6, 3), [FiniteLoss(), LossScaleMonitor()])
    with pytest.raises(NonFiniteError, match=r"loss: nan at step 3 .*amp_fp16"):
        trainer.fit()
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    trainer = _scaled_on_cpu(Poisoned(overflow=True), batches(60, *range(2, 61)), [FiniteLoss(), LossScaleMonitor()])
    with pytest.raises(NonFiniteError, match=r"loss scale: 6.1e-05 .*after 30 steps whose gradients overflowed"):
        trainer.fit()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_skipped_by_the_scaler_and_does_not_stop_the_run(fused: bool) -> None:
    model = Poisoned(overflow=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    monitor, snapshots = LossScaleMonitor(), Snapshots()
    trainer = trained(
        model=model, batches=batches(6, 3, 5), optimizer=optimizer, callbacks=[FiniteLoss(), monitor, snapshots], **HALF
    )
    assert monitor.summary() == {"loss_scale": 2.0**14, "loss_scale_skips": 2}
    assert [same for same in snapshots.unchanged if same] == [True, True]
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    logger: Any = trainer.logger.destinations[0]
    assert [float(v) for _, v in logger.data["numerics/loss_scale"]] == [2**16, 2**16, 2**15, 2**15, 2**14, 2**14]


@pytest.mark.gpu
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_nonfinite_loss_is_not_counted_as_an_overflow(on_nonfinite: Any) -> None:
    guard = FiniteLoss(on_nonfinite)
    trainer = make_trainer(model=Poisoned(), batches=batches(6, 3), callbacks=[guard, LossScaleMonitor()], **HALF)
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteError, match=r"loss: nan at step 3 .*amp_fp16"):
            trainer.fit()
    else:
        trainer.fit()
        assert guard.summary() == {"nonfinite_losses": 1, "skipped_steps": 1}
    assert all(p.isfinite().all() for p in trainer.state.model.parameters())
    trainer.close()


@pytest.mark.gpu
def test_gradients_that_overflow_at_any_scale_stop_the_run() -> None:
    with pytest.raises(NonFiniteError, match=r"loss scale: 6.1e-05 .*after 30 steps whose gradients overflowed"):
        trained(
            model=Poisoned(overflow=True),
            batches=batches(60, *range(2, 61)),
            callbacks=[FiniteLoss(), LossScaleMonitor()],
            **HALF,
        )


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
