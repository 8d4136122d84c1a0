"""Regression on texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, SpearmanCorrCoef

from composer_speedups.tasks.metrics import Pearson
from composer_speedups.tasks.settings import RegressionSettings
from composer_speedups.tasks.task import Task


class Regression(RegressionSettings, Task):
    """Regression with mean squared error; its root, mean absolute error, Pearson and Spearman correlation."""

    def best_constant(self, labels: Sequence[float]) -> dict[str, float]:
        labels_R = np.array(labels)
        mean, median = labels_R.mean(), np.median(labels_R)  # the best constant for the RMSE, and that for the MAE
        mae = abs(labels_R - median).mean()
        return {"mean": float(mean), "rmse": float(labels_R.std()), "median": float(median), "mae": float(mae)}

    def head_settings(self) -> dict[str, Any]:
        return {"problem_type": "regression", "num_labels": 1}

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {"MeanSquaredError": MeanSquaredError()}
        if not training:
            metrics |= {
                "RootMeanSquaredError": MeanSquaredError(squared=False),
                "MeanAbsoluteError": MeanAbsoluteError(),
            }
            metrics |= {"PearsonCorrCoef": Pearson(), "SpearmanCorrCoef": SpearmanCorrCoef()}
        return metrics

    def update_metric(self, metric: Metric, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> None:
        metric.update(logits.float(), labels.float())

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"score": value} for value in logits.float().flatten().tolist()]
