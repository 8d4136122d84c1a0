"""Loss and accuracy at the end of a run, under the names that reports and dashboards share."""

from __future__ import annotations

from composer.core import State

__all__ = ["final_metrics"]

_NAMES = {
    "MulticlassAccuracy": "accuracy",
    "CrossEntropy": "loss",
    "MaskedAccuracy": "accuracy",
    "LanguageCrossEntropy": "loss",
}


def final_metrics(state: State) -> dict[str, float]:
    """Loss and accuracy of the last training batch (``train_``) and of the last evaluation.

    With several ranks, every rank must call: a metric is computed over all of them.
    """
    metrics: dict[str, float] = {}
    if state.total_loss_dict:
        metrics["train_loss"] = float(state.total_loss_dict["loss/train/total"])
    for prefix, group in [
        ("train_", state.train_metrics or {}),
        *(("", m) for m in state.eval_metrics.values()),
    ]:
        for name, metric in group.items():
            if metric.update_called:
                metrics.setdefault(prefix + _NAMES.get(name, name), float(metric.compute()))
    return metrics
