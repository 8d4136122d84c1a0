"""Find the metric of the evaluation that a setting names, and whether larger values of it are better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NotRequired

from composer.core import State

from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.tasks.metrics import reported_name

__all__ = [
    "EVALUATED_FIELDS",
    "EvaluatedMetric",
    "compares_alike",
    "find_metric",
    "is_evaluation_of",
    "metric_of_evaluator",
]

EVALUATED_FIELDS: dict[str, Any] = {  # in checkpoints, to tell several callbacks apart; older ones lack them
    "dataloader_label": NotRequired[str],
    "metric": NotRequired[str],
    "mode": NotRequired[str | None],
}
_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "entropy")


class EvaluatedMetric(NamedTuple):
    """A metric of the evaluation.

    Attributes:
        logged: The name under which it is logged, such as ``MulticlassAccuracy``.
        reported: Its name in report.json, such as ``accuracy``.
        mode: Whether its smallest or its largest value is best.
    """

    logged: str
    reported: str
    mode: Literal["min", "max"]


def find_metric(metrics: Mapping[str, Any], name: str, key: str = "metric") -> EvaluatedMetric:
    """Find a metric by its logged name or by its name in report.json.

    The smallest or the largest value is best as the metric's ``higher_is_better`` says. If that is None, the smallest
    value is best for a loss, error or perplexity, and the largest for other metrics.

    Args:
        metrics: Logged name → torchmetrics metric, all of the evaluation.
        name: The name to find.
        key: The setting that holds the name, for errors. Default ``"metric"``, as in the callbacks.

    Raises:
        ConfigError: The evaluation has no such metric.
    """
    by_reported = {reported_name(logged): logged for logged in metrics}
    logged = name if name in metrics else by_reported.get(name)
    if logged is None:
        hint = did_you_mean(name, by_reported, otherwise=None if metrics else "; there is no evaluation")
        raise ConfigError(f"{key}: {name!r} is not a metric of the evaluation{hint}")
    reported, larger_is_better = reported_name(logged), metrics[logged].higher_is_better
    if larger_is_better is None:
        larger_is_better = not any(word in reported.lower() for word in _SMALLER_IS_BETTER)
    return EvaluatedMetric(logged, reported, "max" if larger_is_better else "min")


def metric_of_evaluator(state: State, label: str, name: str) -> EvaluatedMetric:
    """Find a metric of the Trainer's evaluator with this label; see :func:`find_metric`.

    Raises:
        ConfigError: There is no such evaluator, or it has no such metric.
    """
    labels = [evaluator.label for evaluator in state.evaluators]
    if labels and label not in labels:
        raise ConfigError(
            f"dataloader_label: no evaluator has the label {label!r}; set it to one of {', '.join(labels)}"
        )
    return find_metric(state.eval_metrics.get(label, {}), name)


def compares_alike(settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether settings with ``dataloader_label``, ``metric`` and ``mode`` compare the same values; one that is missing
    or None may be any."""
    for name in EVALUATED_FIELDS:
        one, other = (reported_name(values.get(name) or "") for values in (settings, others))
        if one and other and one != other:
            return False
    return True


def is_evaluation_of(state: State, label: str) -> bool:
    """Whether the Trainer's own evaluator with this label is running, and not other data given to ``trainer.eval()``,
    which has the label ``eval`` unless it is named."""
    own = next((evaluator for evaluator in state.evaluators if evaluator.label == label), None)
    return own is not None and state.dataloader is own.dataloader.dataloader
