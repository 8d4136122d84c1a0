"""Stop at a NaN or infinite loss, or skip its batch."""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

import torch
from composer.core import Event, State
from composer.loggers import Logger

from composer_speedups.callbacks.checkpoint_veto import resume_advice, veto_checkpoints
from composer_speedups.callbacks.config import FiniteLossConfig
from composer_speedups.callbacks.nonfinite import circumstances, nonfinite_gradients, nonfinite_weights
from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.errors import RunFailedError
from composer_speedups.core.trainer_state import any_rank
from composer_speedups.distributed.gradient_readers import reads_no_gradients
from composer_speedups.distributed.host_scalars import HostCopy

__all__ = ["FiniteLoss"]

log = logging.getLogger(__name__)


class FiniteLoss(FiniteLossConfig, SavedCallback, eq=False):
    """Stops at a NaN or infinite loss or skips its batch, and keeps NaN and infinite weights out of checkpoints.

    With ``"stop"``, it checks the loss that Composer has read for its log at the end of each batch, without
    synchronizing. Composer has reduced that loss over ranks, so all of them stop, before the next checkpoint or
    evaluation.

    With ``"skip"``, the loss is copied to the host after the forward pass. If it is not finite on any rank, the batch's
    gradients are dropped before the optimizer steps: weights and optimizer state do not change, and the schedule
    advances. On several ranks this costs one more reduction per batch. The first batch of a run is never skipped,
    because techniques are verified in it (after a resume, in the next one). Neither is a batch skipped if the weights
    themselves are not finite, since further batches cannot repair them.

    In both cases the weights are checked before each checkpoint and at the end, because gradients may overflow while
    the loss is finite. In fp16 the gradient scaler handles such gradients (:class:`LossScaleMonitor`).

    Logged at each skip and at the end: ``numerics/nonfinite_losses`` and ``numerics/skipped_steps``.

    Args:
        on_nonfinite: ``"stop"`` (default) or ``"skip"``.
        max_skips: Number of consecutive skipped batches after which the run stops. Default 10.

    Raises:
        ValueError: An invalid ``on_nonfinite``, or ``max_skips`` below 1.
        RunFailedError: From ``fit``; one line with the step, its batch, the learning rate and the engaged techniques.
    """

    checkpoint_fields: ClassVar[dict[str, Any]] = {"losses": int, "skipped": int, "in_row": int}

    def reset(self) -> None:
        self.losses = self.skipped = 0
        self.in_row = self._trained = 0
        self._resumed = False
        self._sent: list[HostCopy] = []  # losses of this batch's micro-batches that are being copied to the host

    def fit_start(self, state: State, logger: Logger) -> None:
        veto_checkpoints(state, self._may_save)
        self._trained, self._resumed = 0, state.timestamp.batch.value > 0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self._sent = []  # also called when automatic micro-batching tries again

    def after_loss(self, state: State, logger: Logger) -> None:
        if self.on_nonfinite == "skip":
            self._sent.append(HostCopy(_total(state.loss)))

    @reads_no_gradients
    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self.on_nonfinite == "skip":
            self._skip_nonfinite(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics({f"numerics/{name}": value for name, value in self.summary().items()})
        self._check_weights(state, "at the end of the run")

    def _skip_nonfinite(self, state: State) -> None:
        values = [sent.receive() for sent in self._sent]
        if not any_rank(state.device, not all(map(math.isfinite, values))):
            self.in_row = 0
            return
        self.in_row += 1
        loss = next((v for v in values if not math.isfinite(v)), math.nan)  # otherwise it was another rank's loss
        step = circumstances(state, ended=False)
        if weights := self._bad_weights(state):
            raise RunFailedError(f"loss: {loss} at {step}; {weights} are not finite: {_advice(state)}")
        if self._trained == 0 and not self._resumed:
            raise RunFailedError(f"loss: {loss} at {step}: the first batch is never skipped; {_advice(state)}")
        if self.in_row > self.max_skips:
            raise RunFailedError(
                f"loss: {loss} at {step}: {self.max_skips} batches in a row were skipped before it "
                f"(callbacks.finite_loss.max_skips); {_advice(state)}"
            )
        self.skipped += 1
        log.warning("loss: %s at %s: the batch is skipped, %d so far", loss, step, self.skipped)
        for parameter in state.model.parameters():
            # optimizers ignore parameters without gradients, including their state and weight decay
            parameter.grad = None

    def batch_end(self, state: State, logger: Logger) -> None:
        self._trained += 1
        loss = state.total_loss_dict.get("loss/train/total", 0.0)  # already on the host
        if math.isfinite(loss):
            return
        self.losses += 1
        if self.on_nonfinite == "skip":
            logger.log_metrics({f"numerics/{name}": value for name, value in self.summary().items()})
            return
        gradients = nonfinite_gradients(state) or "no gradient"
        raise RunFailedError(f"loss: {loss} at {circumstances(state)}; not finite: {gradients}; {_advice(state)}")

    def _bad_weights(self, state: State) -> str | None:
        bad = nonfinite_weights(state)
        return bad or "another rank's weights" if any_rank(state.device, bad is not None) else None

    def _check_weights(self, state: State, when: str) -> None:
        if bad := self._bad_weights(state):
            raise RunFailedError(f"weights: {bad} are not finite {when}, {circumstances(state)}; {_advice(state)}")

    def _may_save(self, state: State, event: Event) -> bool:
        self._check_weights(state, "at a scheduled checkpoint, which is not written")
        return True

    def summary(self) -> dict[str, int]:
        """The entry in the ``guards`` section of report.json: batches with a NaN or infinite loss, and skipped
        steps."""
        return {"nonfinite_losses": self.losses, "skipped_steps": self.skipped}


def _total(loss: Any) -> torch.Tensor:
    """The sum of a batch's losses, in new memory: CUDA graphs write the next micro-batch's loss to the same one."""
    parts = loss.values() if isinstance(loss, dict) else loss if isinstance(loss, (list, tuple)) else [loss]
    return torch.stack([part.detach().float().mean() for part in parts]).sum()


def _advice(state: State) -> str:
    return resume_advice(state, "a lower optimizer.lr, optimizer.max_grad_norm or fewer techniques")
