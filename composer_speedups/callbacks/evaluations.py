"""Callbacks that compare evaluations by a metric: one keeps the best weights, one stops training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from composer.core import State, Time, TimeUnit
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from composer_speedups.callbacks.checkpoints import SavedCallback
from composer_speedups.callbacks.config import BestWeightsConfig, EarlyStoppingConfig, smaller_is_better
from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.tasks.metrics import reported_name, reported_values


class _ComparesEvaluations(SavedCallback):
    """Reads one metric of each evaluation of the Trainer's own evaluator; all ranks use rank 0's value."""

    metric: str
    mode: Literal["min", "max"] | None
    dataloader_label: str

    def reset(self) -> None:
        self.compared = ""  # what the values below were compared by
        self._reported = self.metric  # the metric's name in report.json

    def fit_start(self, state: State, logger: Logger) -> None:
        self._find(state)

    def _find(self, state: State) -> None:
        label = self.dataloader_label
        labels = [evaluator.label for evaluator in state.evaluators]
        if labels and label not in labels:
            fix = f"set it to one of {', '.join(labels)}"
            raise ConfigError(f"dataloader_label: no evaluator has the label {label!r}; {fix}")
        reported, best = find_metric(state.eval_metrics.get(label, {}), self.metric)
        compared = f"{self.mode or best} {reported} of {label}"
        if self.compared not in ("", compared):
            restart = f"{type(self).__name__} starts anew: the checkpoint's"
            warnings.warn(f"{restart} compared {self.compared}, and this one {compared}", UserWarning, stacklevel=3)
            self.reset()
        self.compared, self._reported, self.mode = compared, reported, self.mode or best

    def eval_end(self, state: State, logger: Logger) -> None:
        if not is_evaluation_of(state, self.dataloader_label):
            return
        self._find(state)  # trainer.eval() may come before fit()
        names = state.eval_metrics[self.dataloader_label]
        shared = [reported_values({name: state.eval_metric_values[name] for name in names})]
        dist.broadcast_object_list(shared)
        self._compare(state, logger, shared[0])

    def _compare(self, state: State, logger: Logger, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def _is_better(self, value: float, best: float, by: float = 0.0) -> bool:
        return (best - value if self.mode == "min" else value - best) > by


class BestWeights(BestWeightsConfig, _ComparesEvaluations, eq=False):
    """Keeps a copy of the weights of the evaluation at which a metric was best. :meth:`restore` loads it.

    The copy is in the host memory of rank 0, and part of every checkpoint. The first of several equal evaluations is
    kept; one whose value is NaN or infinite is not. ``trainer.eval()`` counts, too, but not on other data that it is
    given, such as a test set.

        best = BestWeights("accuracy")
        trainer = Trainer(..., callbacks=[best])
        trainer.fit()
        best.restore(trainer.state)  # then save or evaluate the model

    Logged at each new best evaluation: ``best/<metric>`` and ``best/batch``.

    Args:
        metric: A metric of the evaluation, by its logged name (``MulticlassAccuracy``) or its name in report.json
            (``accuracy``). Default ``"loss"``.
        mode: ``"min"`` or ``"max"``: which value is best. Default None: as the metric's ``higher_is_better`` says, or
            else ``"min"`` for a loss, error or perplexity and ``"max"`` for other metrics.
        dataloader_label: Label of the evaluator. Default ``"eval"``.

    Attributes:
        batch: The number of batches trained before the best evaluation; None before the first evaluation.
        metrics: All scalar metrics of the best evaluation, by their names in report.json.
        weights: Name → tensor of the best weights, on rank 0.
        last: The metric's value at the last evaluation.

    Raises:
        ConfigError: From ``fit``, if there is no such evaluator or metric.
    """

    dataloader_label: str = "eval"
    """Label of the evaluator."""

    saved: ClassVar[tuple[str, ...]] = ("compared", "batch", "metrics", "weights", "last")

    def reset(self) -> None:
        _ComparesEvaluations.reset(self)
        self.batch: int | None = None
        self.metrics: dict[str, float] = {}
        self.weights: dict[str, Tensor] = {}
        self.last: float | None = None

    def after_load(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            self.weights = {}

    def _compare(self, state: State, logger: Logger, metrics: dict[str, float]) -> None:
        self.last = metrics[self._reported]
        if not math.isfinite(self.last):
            return
        if self.batch is None or self._is_better(self.last, self.metrics[self._reported]):
            self.batch, self.metrics = state.timestamp.batch.value, metrics
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights: dict[str, Any] = get_model_state_dict(state.model, options=options)  # empty on other ranks
            self.weights = {name: value.clone() for name, value in weights.items()}
            logger.log_metrics({f"best/{self._reported}": self.last, "best/batch": self.batch})

    def restore(self, state: State) -> bool:
        """Load the best weights into the model, in place, and return whether there was a best evaluation. Collective.

        The optimizer's state stays that of the last batch, so training should not continue from here.
        """
        if self.batch is None:
            return False
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
        set_model_state_dict(state.model, dict(self.weights), options=options)
        return True

    def summary(self) -> dict[str, Any]:
        """The section ``best`` of report.json; empty if there was no evaluation."""
        if self.batch is None:
            return {}
        shown = {"metric": self._reported, "mode": self.mode, "value": self.metrics[self._reported]}
        return {**shown, "batch": self.batch, "last_value": self.last}


class EarlyStopping(EarlyStoppingConfig, _ComparesEvaluations, eq=False):
    """Composer's ``EarlyStopper``, with its state in checkpoints.

    A resumed run stops after the same batch as an uninterrupted one; Composer's forgets the best value, and continues a
    run that it had stopped. A NaN is never the best value. As in Composer, training stops at the first evaluation that
    comes more than ``patience`` after the last improvement: with an evaluation per epoch and a patience of 1 epoch, at
    the second one in a row without an improvement.

    Args:
        metric: As for :class:`BestWeights`; likewise ``mode`` and ``dataloader_label``.
        patience: A Composer time in epochs or batches. Default ``"1ep"``.
        min_delta: Only a change by more than this counts as an improvement. Default 0.

    Attributes:
        best: The best value so far; None before the first evaluation.
        best_batch: The number of batches trained before it.
        stopped: Whether training was stopped before its ``max_duration``.

    Raises:
        ConfigError: From ``fit``, if there is no such evaluator or metric.
    """

    dataloader_label: str = "eval"
    """Label of the evaluator."""

    saved: ClassVar[tuple[str, ...]] = ("compared", "best", "best_epoch", "best_batch", "stopped")

    def reset(self) -> None:
        _ComparesEvaluations.reset(self)
        self.best: float | None = None
        self.best_epoch = self.best_batch = 0
        self.stopped = self._had_stopped = self._training = False

    def after_load(self, state: State, logger: Logger) -> None:
        self._had_stopped = self.stopped

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        self._training = True
        self.stopped, self._had_stopped = self._had_stopped, False  # a later fit() continues
        if self.stopped:
            state.stop_training()  # the run was interrupted after training had stopped

    def _compare(self, state: State, logger: Logger, metrics: dict[str, float]) -> None:
        if not self._training:
            return
        value, time = metrics[self._reported], state.timestamp
        if self.best is None or math.isnan(self.best) or self._is_better(value, self.best, self.min_delta):
            self.best, self.best_epoch, self.best_batch = value, time.epoch.value, time.batch.value
        patience = Time.from_input(self.patience)
        in_epochs = patience.unit == TimeUnit.EPOCH
        waited = time.epoch.value - self.best_epoch if in_epochs else time.batch.value - self.best_batch
        if waited > patience.value and state.max_duration is not None and time < state.max_duration:
            self.stopped = True
            state.stop_training()

    def summary(self) -> dict[str, Any]:
        """The section ``early_stopping`` of report.json."""
        shown = {"metric": self._reported, "mode": self.mode, "stopped": self.stopped}
        return {**shown, "best": self.best, "best_batch": self.best_batch}


def find_metric(metrics: Mapping[str, Any], name: str, key: str = "metric") -> tuple[str, Literal["min", "max"]]:
    """The name in report.json of a metric that is called so there or in loggers, and which of its values is best."""
    by_reported = {reported_name(logged): logged for logged in metrics}
    logged = name if name in metrics else by_reported.get(name)
    if logged is None:
        hint = did_you_mean(name, by_reported, otherwise=None if metrics else "; there is no evaluation")
        raise ConfigError(f"{key}: {name!r} is not a metric of the evaluation{hint}")
    reported, larger_is_better = reported_name(logged), metrics[logged].higher_is_better
    if larger_is_better is None:
        larger_is_better = not smaller_is_better(reported)
    return reported, "max" if larger_is_better else "min"


def is_evaluation_of(state: State, label: str) -> bool:
    """Whether the Trainer's own evaluator with this label is running, not other data given to ``trainer.eval()``."""
    own = next((evaluator for evaluator in state.evaluators if evaluator.label == label), None)
    return own is not None and state.dataloader is own.dataloader.dataloader
