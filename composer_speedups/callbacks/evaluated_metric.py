"""Find a metric of the evaluation by its name, and whether larger values of it are better."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from composer.core import State

from composer_speedups.core.errors import ConfigError, did_you_mean
from composer_speedups.tasks.metrics import reported_name

__all__ = ["logged_name", "mode_of", "reported_values"]

_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "entropy")


def logged_name(metrics: Iterable[str], name: str, key: str) -> str:
    """The name under which a metric is logged, given that name or the one in report.json.

    Args:
        metrics: The logged names of the evaluation's metrics.
        name: The name to find, such as ``accuracy`` or ``MulticlassAccuracy``.
        key: The setting that holds it, for errors.

    Raises:
        ConfigError: The evaluation has no such metric.
    """
    logged = list(metrics)
    if name in logged:
        return name
    by_reported = {reported_name(metric): metric for metric in logged}
    if name not in by_reported:
        hint = did_you_mean(name, by_reported) if logged else "; there is no evaluation"
        raise ConfigError(f"{key}: {name!r} is not a metric of the evaluation{hint}")
    return by_reported[name]


def mode_of(metric: Any, name: str) -> Literal["min", "max"]:
    """Whether the smallest or the largest value is best, as the torchmetrics metric declares, or else by its name."""
    if metric.higher_is_better is not None:
        return "max" if metric.higher_is_better else "min"
    reported = reported_name(name).lower()
    return "min" if any(word in reported for word in _SMALLER_IS_BETTER) else "max"


def reported_values(state: State, label: str) -> dict[str, float]:
    """The scalar metrics of the evaluation that has just ended, by their names in report.json.

    Args:
        state: The Trainer's state at EVAL_END.
        label: The evaluator's label.
    """
    values = {name: state.eval_metric_values[name] for name in state.eval_metrics[label]}
    return {reported_name(name): float(value) for name, value in values.items() if not getattr(value, "ndim", 0)}
