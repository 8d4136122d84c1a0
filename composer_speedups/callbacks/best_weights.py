"""Keep the weights of the best evaluation."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from composer_speedups.callbacks.config import BestWeightsConfig
from composer_speedups.callbacks.evaluated_metric import (
    EVALUATED_FIELDS,
    compares_alike,
    is_evaluation_of,
    metric_of_evaluator,
)
from composer_speedups.callbacks.saved_callback import SavedCallback
from composer_speedups.core.errors import ConfigError
from composer_speedups.tasks.metrics import reported_values

__all__ = ["BestWeights"]


class BestWeights(BestWeightsConfig, SavedCallback, eq=False):
    """Keeps a copy of the weights of the evaluation at which a metric was best. :meth:`restore` loads it.

    The copy is in the host memory of rank 0, and part of every checkpoint, which becomes larger by the size of the
    model: a run that is resumed from any checkpoint has exactly the best weights up to that point. The first of several
    equal evaluations is kept; an evaluation whose value is NaN or infinite is not. On several ranks, rank 0 decides.
    ``trainer.eval()`` counts, too, but not on other data that it is given, such as a test set.

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
        ConfigError: From ``fit``, if there is no such evaluator or metric; at loading, if the weights in the checkpoint
            do not fit the model.
    """

    dataloader_label: str = "eval"
    """Label of the evaluator."""

    checkpoint_fields: ClassVar[dict[str, Any]] = EVALUATED_FIELDS | {
        "batch": int | None,
        "metrics": dict[str, float],
        "weights": dict[str, Tensor],
        "last": float | None,
    }

    def reset(self) -> None:
        super().reset()
        self.batch: int | None = None
        self.metrics: dict[str, float] = {}
        self.weights: dict[str, Tensor] = {}
        self._reported = self.metric  # the metric's name in report.json
        self.last: float | None = None

    def owns(self, state: dict[str, Any]) -> bool:
        return compares_alike(vars(self), state)

    def after_load(self, state: State, logger: Logger) -> None:
        if self.batch is None:
            return
        own: dict[str, Any] = get_model_state_dict(state.model)
        shapes = {name: value.shape for name, value in own.items()}
        if shapes != {name: value.shape for name, value in self.weights.items()}:
            raise ConfigError(
                f"checkpoint.load: the best weights in {state.load_path} do not fit the model; use another checkpoint, "
                "or checkpoint.weights_only=true loads its last weights only"
            )
        if dist.get_global_rank() != 0:
            self.weights = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        self._find(state)

    def _find(self, state: State) -> None:
        found = metric_of_evaluator(state, self.dataloader_label, self.metric)
        self._reported, self.mode = found.reported, self.mode or found.mode

    def eval_end(self, state: State, logger: Logger) -> None:
        if not is_evaluation_of(state, self.dataloader_label):
            return
        self._find(state)  # trainer.eval() may come before fit()
        names = state.eval_metrics[self.dataloader_label]
        shared = [reported_values({name: state.eval_metric_values[name] for name in names})]
        dist.broadcast_object_list(shared)
        self.last = shared[0][self._reported]
        if not self._is_best(self.last):
            return
        self.batch, self.metrics = state.timestamp.batch.value, shared[0]
        self.weights = _copy_of_weights(state)
        logger.log_metrics({f"best/{self._reported}": self.last, "best/batch": self.batch})

    def _is_best(self, value: float) -> bool:
        if not math.isfinite(value) or self.batch is None:
            return math.isfinite(value)
        best = self.metrics[self._reported]
        return value < best if self.mode == "min" else value > best

    def restore(self, state: State) -> bool:
        """Load the best weights into the model, in place. Collective: every rank must call it.

        The optimizer's state stays that of the last batch, so training should not continue from here.

        Returns:
            Whether there was a best evaluation; otherwise the weights do not change.
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
        return {
            "metric": self._reported,
            "mode": self.mode,
            "value": self.metrics[self._reported],
            "batch": self.batch,
            "last_value": self.last,
        }


def _copy_of_weights(state: State) -> dict[str, Tensor]:
    """A copy of the whole model's weights in the host memory of rank 0; empty on other ranks. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(state.model, options=options)
    return {name: value.clone() for name, value in weights.items()}
