"""Watch the training loss: NaN and infinite values, divergence, and fp16's loss scale; and record it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from composer.core import Callback, Event, Precision, State
from composer.loggers import Logger
from torch import Tensor

from composer_speedups.callbacks.checkpoints import SavedCallback, last_checkpoint, resume_advice, veto_checkpoints
from composer_speedups.callbacks.config import DivergenceConfig, FiniteLossConfig
from composer_speedups.core.engaging import techniques_of
from composer_speedups.core.errors import RunFailedError
from composer_speedups.core.trainer_state import any_rank, last_batch, local_shard
from composer_speedups.distributed.composer_loop import reads_no_gradients
from composer_speedups.distributed.fsdp import GradientClipping
from composer_speedups.distributed.host_scalars import HostCopy

log = logging.getLogger(__name__)

MIN_SCALE = 1e-4  # as fairseq's --min-loss-scale: with a smaller scale, gradients overflow at any scale


class LossMonitor(SavedCallback):
    """Stops at a NaN, infinite or diverging loss, keeps such weights out of checkpoints, and records the loss.

    It reads the loss that Composer has read for its log, averaged over ranks, so that it adds no synchronization.

    **NaN and infinite losses** (``finite_loss``). With ``on_nonfinite="stop"`` all ranks stop after that batch, before
    the next checkpoint or evaluation. With ``"skip"``, if the loss is not finite on any rank, the batch's gradients are
    dropped before the optimizer steps, which on several ranks costs one more reduction per batch. The first batch of a
    run is never skipped, because techniques are observed in it, nor is one whose weights are not finite. Weights are
    checked before each checkpoint and at the end, because gradients may overflow while the loss is finite.

    **Divergence** (``divergence``). While the moving average of the loss is above ``factor`` times its value at the
    last good checkpoint plus ``margin``, checkpoints are not written, so that the last good one remains. After
    ``batches`` consecutive batches above that limit the run stops and names it. Before the first checkpoint, the value
    after 1 / (1 - smoothing) batches is the reference. Batches with a NaN or infinite loss are ignored here.

    **fp16**: steps that the gradient scaler skips because gradients overflowed are harmless, unless its scale falls
    below 1e-4: then the run stops.

    Logged after the first batch, every ``interval`` batches and after the last one: ``optimizer/learning_rate`` of the
    first parameter group, ``numerics/smoothed_loss``, and one batch later, so that the host need not wait for the
    device, ``optimizer/gradient_norm`` (before clipping, if :class:`.GradientClipping` computes it) and
    ``numerics/loss_scale`` (fp16); at each skip and at the end, ``numerics/nonfinite_losses`` and
    ``numerics/skipped_steps``.

    Args:
        finite_loss: What to do at a NaN or infinite loss; None does nothing. Default: stop.
        divergence: When a loss counts as diverging. Default None: never.
        interval: Number of batches between two logged values. Default 10.
        metrics_at_interval: Compute training metrics only for the logged batches; in others, ``state.train_metrics`` is
            None, so Composer does not switch all modules to eval mode and back. Default False.

    Attributes:
        losses: Batch number → training loss of the batch.
        reference: The smoothed loss at the last good checkpoint, or at the start; None before.
        withheld: Number of checkpoints that were not written.

    Raises:
        RunFailedError: From ``fit``; one line with the step, its batch, the learning rate and the engaged techniques.
    """

    saved = (
        *("losses", "nonfinite", "skipped", "skipped_in_row"),
        *("reference", "withheld", "_sum", "_weight", "_averaged", "_above"),
    )

    def __init__(
        self,
        finite_loss: FiniteLossConfig | None = FiniteLossConfig(),  # noqa: B008
        divergence: DivergenceConfig | None = None,
        interval: int = 10,
        *,
        metrics_at_interval: bool = False,
    ) -> None:
        if interval < 1:
            raise ValueError(f"interval must be at least 1, not {interval}")
        self.finite_loss, self.divergence, self.interval = finite_loss, divergence, interval
        self.metrics_at_interval = metrics_at_interval
        super().__init__()

    def reset(self) -> None:
        self.losses: dict[int, float] = {}
        self.nonfinite = self.skipped = self.skipped_in_row = 0
        self.reference: float | None = None
        self.withheld = 0
        self._sum = self._weight = 0.0
        self._averaged = self._above = 0
        self._rate: Any = 0.0
        self._last_batch: int | None = None
        self._metrics: Any = None  # Composer's training metrics, while it has none
        self._scaler: Any = None
        self._scale: float | None = None
        self._sent: dict[str, HostCopy] = {}  # values that are being copied to the host

    def init(self, state: State, logger: Logger) -> None:
        super().init(state, logger)
        if self.finite_loss is not None and self.finite_loss.on_nonfinite == "skip":
            state.callbacks.append(_SkipNonFinite(self, self.finite_loss))

    def fit_start(self, state: State, logger: Logger) -> None:
        veto_checkpoints(state, self._may_save)
        self._sent = {}
        self._last_batch = last_batch(state)
        self._metrics = state.train_metrics if self.metrics_at_interval else None
        self._group = state.optimizers[0].param_groups[0]
        self._rate = self._group["lr"]
        self._clipping = next((a for a in state.algorithms if isinstance(a, GradientClipping)), None)
        self._scaler = state.scaler if state.precision == Precision.AMP_FP16 else None

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        rate, self._rate = self._rate, self._group["lr"]  # Composer's schedulers have already set the next one
        if self._sent:
            self._receive(state, logger)
        loss = state.total_loss_dict.get("loss/train/total")
        if loss is not None:  # fp16 skips steps with overflowing gradients
            self._note(state, logger, batch, float(loss))
        if self._is_logged(batch):
            smoothed = {"numerics/smoothed_loss": self.smoothed} if self._weight else {}
            logger.log_metrics({"optimizer/learning_rate": float(rate), **smoothed})
            self._send()
        if self._metrics is not None:
            state.train_metrics = self._metrics  # for checkpoints, which hold those of the last logged batch

    def _is_logged(self, batch: int) -> bool:
        # what follows the last batch, such as its checkpoint, has its metrics
        return batch == 1 or batch % self.interval == 0 or (self._last_batch is not None and batch >= self._last_batch)

    def batch_start(self, state: State, logger: Logger) -> None:
        if self._metrics is not None and not self._is_logged(state.timestamp.batch.value + 1):
            state.train_metrics = None  # so that Composer computes none

    def _note(self, state: State, logger: Logger, batch: int, loss: float) -> None:
        finite = math.isfinite(loss)
        if not finite and self.finite_loss is not None:
            self.nonfinite += 1
            if self.finite_loss.on_nonfinite == "stop":
                named = ((name, p.grad) for name, p in state.model.named_parameters() if p.grad is not None)
                found = _describe("gradients", named) or "no gradient"
                raise RunFailedError(f"loss: {loss} at {_circumstances(state)}; not finite: {found}; {_advice(state)}")
            self._log_counts(logger)
        self.losses[batch] = loss
        if finite and self.divergence is not None:
            self._average(state, self.divergence, loss)

    def _send(self) -> None:
        if self._scaler is not None and (scale := self._scaler._get_scale_async()) is not None:
            self._sent["numerics/loss_scale"] = HostCopy(scale.clone())  # the next batch writes to the same memory
        if self._clipping is not None and self._clipping.norm is not None:
            self._sent["optimizer/gradient_norm"] = HostCopy(self._clipping.norm)

    def _receive(self, state: State, logger: Logger) -> None:
        values = {name: sent.receive() for name, sent in self._sent.items()}
        self._sent = {}
        logger.log_metrics(values)
        if "numerics/loss_scale" in values:
            self._scale = values["numerics/loss_scale"]
            if self._scale < MIN_SCALE:
                raise RunFailedError(
                    f"loss scale: {self._scale:.3g} at {_circumstances(state)}; gradients overflow at any scale: train "
                    "in bf16 or fp32, or lower optimizer.lr"
                )

    def close(self, state: State, logger: Logger) -> None:
        if self._metrics is not None:
            state.train_metrics, self._metrics = self._metrics, None

    def fit_end(self, state: State, logger: Logger) -> None:
        self.close(state, logger)
        self._send()
        self._receive(state, logger)
        if self.finite_loss is not None:
            self._log_counts(logger)
            self._check_weights(state, "at the end of the run")

    # NaN and infinite values

    def _log_counts(self, logger: Logger) -> None:
        logger.log_metrics({"numerics/nonfinite_losses": self.nonfinite, "numerics/skipped_steps": self.skipped})

    def _check_weights(self, state: State, when: str) -> None:
        if bad := _nonfinite_weights(state):
            raise RunFailedError(f"weights: {bad} are not finite {when}, {_circumstances(state)}; {_advice(state)}")

    def _may_save(self, state: State, event: Event) -> bool:
        if self.finite_loss is not None:
            self._check_weights(state, "at a scheduled checkpoint, which is not written")
        if self._above:
            self.withheld += 1
            log.warning("loss: %.4g is above %.4g: no checkpoint is written", self.smoothed, self.limit)
            return False
        if self.reference is not None:
            self.reference = self.smoothed
        return True

    # Divergence

    @property
    def smoothed(self) -> float:
        """The bias-corrected moving average of the loss."""
        return self._sum / self._weight

    @property
    def limit(self) -> float:
        """The largest smoothed loss that does not count as diverging."""
        if self.reference is None or self.divergence is None:
            return math.inf
        return self.divergence.factor * self.reference + self.divergence.margin

    def _average(self, state: State, settings: DivergenceConfig, loss: float) -> None:
        self._sum = settings.smoothing * self._sum + (1 - settings.smoothing) * loss
        self._weight = settings.smoothing * self._weight + (1 - settings.smoothing)
        self._averaged += 1
        if self.reference is None and self._averaged * (1 - settings.smoothing) >= 1 - 1e-9:
            self.reference = self.smoothed
        self._above = self._above + 1 if self.smoothed > self.limit else 0
        if self._above >= settings.batches:
            raise RunFailedError(
                f"loss: diverged at {_circumstances(state)}: for {self._above} batches its smoothed value was above "
                f"{self.limit:.4g}; it is {self.smoothed:.4g} and was {self.reference:.4g} "
                f"{'at the last good checkpoint' if last_checkpoint(state) else 'at the start'}; "
                + resume_advice(state, "a lower optimizer.lr, or optimizer.max_grad_norm")
            )

    def summary(self) -> dict[str, Any]:
        """The ``guards`` section of report.json, with the values of the settings that are in use."""
        values: dict[str, Any] = {}
        if self.finite_loss is not None:
            values |= {"nonfinite_losses": self.nonfinite, "skipped_steps": self.skipped}
        if self._scale is not None:
            values["loss_scale"] = self._scale
        if self.divergence is not None:
            values["smoothed_loss"] = self.smoothed if self._weight else None
            values |= {"loss_at_last_good_checkpoint": self.reference, "checkpoints_withheld": self.withheld}
        return values


class _SkipNonFinite(Callback):
    """Drops the gradients of batches with a NaN or infinite loss. A callback of its own, so that runs that stop at such
    a loss do nothing between the forward pass and the optimizer's step."""

    def __init__(self, monitor: LossMonitor, settings: FiniteLossConfig) -> None:
        self._monitor, self._settings = monitor, settings
        self._first = True
        self._sent: list[HostCopy] = []  # losses of this batch's micro-batches

    def fit_start(self, state: State, logger: Logger) -> None:
        self._first = state.timestamp.batch.value == 0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self._sent = []  # also called when automatic micro-batching tries again

    def after_loss(self, state: State, logger: Logger) -> None:
        self._sent.append(HostCopy(_total(state.loss)))

    @reads_no_gradients
    def after_train_batch(self, state: State, logger: Logger) -> None:
        monitor, first, self._first = self._monitor, self._first, False
        values = [sent.receive() for sent in self._sent]
        if not any_rank(state.device, not all(map(math.isfinite, values))):
            monitor.skipped_in_row = 0
            return
        monitor.skipped_in_row += 1
        loss = next((v for v in values if not math.isfinite(v)), math.nan)  # otherwise it was another rank's loss
        step = _circumstances(state, ended=False)
        if weights := _nonfinite_weights(state):
            raise RunFailedError(f"loss: {loss} at {step}; {weights} are not finite: {_advice(state)}")
        if first:
            raise RunFailedError(f"loss: {loss} at {step}: the first batch is never skipped; {_advice(state)}")
        if monitor.skipped_in_row > self._settings.max_skips:
            raise RunFailedError(
                f"loss: {loss} at {step}: {self._settings.max_skips} batches in a row were skipped before it "
                f"(callbacks.finite_loss.max_skips); {_advice(state)}"
            )
        monitor.skipped += 1
        log.warning("loss: %s at %s: the batch is skipped, %d so far", loss, step, monitor.skipped)
        for parameter in state.model.parameters():
            # optimizers ignore parameters without gradients, including their state and weight decay
            parameter.grad = None


def _total(loss: Any) -> Tensor:
    """The sum of a batch's losses, in new memory: CUDA graphs write the next micro-batch's loss to the same one."""
    parts = loss.values() if isinstance(loss, dict) else loss if isinstance(loss, (list, tuple)) else [loss]
    return torch.stack([part.detach().float().mean() for part in parts]).sum()


def _nonfinite_weights(state: State) -> str | None:
    """``"2 of 39 weights, NAME first"``, or None if all weights are finite on all ranks. Collective."""
    bad = _describe("weights", ((name, p.detach()) for name, p in state.model.named_parameters()))
    return bad or "another rank's weights" if any_rank(state.device, bad is not None) else None


def _describe(what: str, named: Iterable[tuple[str, Tensor]]) -> str | None:
    names, flags = [], []
    for name, tensor in named:
        names.append(name)
        flags.append(torch.isfinite(local_shard(tensor)).all())
    finite = torch.stack(flags).tolist() if flags else []
    bad = [name.removeprefix("module.") for name, good in zip(names, finite, strict=True) if not good]
    return f"{len(bad)} of {len(names)} {what}, {bad[0]} first" if bad else None


def _circumstances(state: State, *, ended: bool = True) -> str:
    """The step, as the middle of a sentence; ``ended`` if Composer has already counted it, as at BATCH_END."""
    time = state.previous_timestamp if ended and state.previous_timestamp is not None else state.timestamp
    rates = sorted({float(group["lr"]) for optimizer in state.optimizers for group in optimizer.param_groups})
    techniques = [t.name for t in techniques_of(state.algorithms) if t.engaged]
    return (
        f"step {time.batch.value + 1} (batch {time.batch_in_epoch.value + 1} of epoch {time.epoch.value + 1}), "
        f"next learning rate {', '.join(f'{rate:.3g}' for rate in rates)}, {state.precision.value}, "
        f"engaged techniques: {', '.join(techniques) or 'none'}"
    )


def _advice(state: State) -> str:
    return resume_advice(state, "a lower optimizer.lr, optimizer.max_grad_norm or fewer techniques")
