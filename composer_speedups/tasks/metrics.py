"""Loss and accuracy: over all ranks, and at the end of a run under the names that reports and dashboards share."""

from __future__ import annotations

from typing import Any

import torch
from composer.core import State
from torch import Tensor

__all__ = ["final_metrics", "gather_alike"]

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


def gather_alike(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Every rank's tensor, by rank, for a metric's ``dist_sync_fn``; they must have one shape on all ranks.

    Composer computes the training metrics after each batch, and torchmetrics' own function has ranks exchange shapes
    and meet at a barrier for each state first, which waits for the GPU.
    """
    gathered = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(gathered, tensor.contiguous(), group)
    return gathered
