"""Multi-label classification of texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelF1Score

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.tasks.labels import TaskWithClasses
from composer_speedups.tasks.metrics import MeanLoss
from composer_speedups.tasks.task import Example, as_list, shown

__all__ = ["Multilabel"]

_FLAGS = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}  # a value, or its text in a CSV file


@dataclass(kw_only=True)
class Multilabel(TaskWithClasses):
    """Multi-label classification with lists of names or a column of 0 and 1 per label; binary cross entropy; F1 and
    mean average precision.

    Attributes:
        label_columns: Columns of 0 and 1, one per label, instead of ``label_column``.
    """

    label_columns: str | Sequence[str] | None = None

    name = "multilabel"
    default_label = "labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_columns:
            self.label_column = None
            self.label_columns = as_list(self.label_columns)
            self.labels = as_list(self.labels or self.label_columns)
            if len(self.labels) != len(self.label_columns):
                raise ConfigError(
                    f"data.labels names {len(self.labels)} labels for {len(self.label_columns)} data.label_columns; "
                    "name one per column, or remove it"
                )

    def columns(self, *, training: bool) -> list[tuple[str, str]]:
        columns = super().columns(training=training)
        return [*columns, *((column, "data.label_columns") for column in self.label_columns or ())]

    def example(self, row: Mapping[str, Any], where: str, *, training: bool) -> Example:
        example = super().example(row, where, training=training)
        if self.label_columns:
            example["labels"] = [self._flag(row.get(column), where, column) for column in self.label_columns]
        return example

    def label(self, value: Any, where: str) -> list[float]:
        present = {*self.classes_of(value, where, "a list of labels (or none)")}
        return [float(i in present) for i in range(len(self.classes))]

    def _flag(self, value: Any, where: str, column: str) -> float:
        flag = _FLAGS.get(str(value).lower())
        if flag is None:
            raise DataError(f"{where}: {column} is {shown(value)}; it must be 0 or 1")
        return flag

    def head_settings(self) -> dict[str, Any]:
        return {"problem_type": "multi_label_classification", **super().head_settings()}

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        settings: dict[str, Any] = {"num_labels": len(self.classes), "validate_args": False}
        metrics: dict[str, Metric] = {
            "MicroF1": MultilabelF1Score(average="micro", **settings),
            "BinaryCrossEntropy": MeanLoss(F.binary_cross_entropy_with_logits),
        }
        if not training:
            metrics["MacroF1"] = MultilabelF1Score(average="macro", **settings)
            metrics["MeanAveragePrecision"] = MultilabelAveragePrecision(average="macro", **settings)
        return metrics

    def update_metric(self, metric: Metric, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> None:
        if isinstance(metric, MeanLoss):
            metric.update(logits, labels)
        else:  # torchmetrics would check on the host whether the values are probabilities
            metric.update(logits.float().sigmoid(), labels.long())

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = [dict(zip(self.classes, row_K, strict=True)) for row_K in logits.float().sigmoid().tolist()]
        return [
            {"labels": [name for name, probability in row.items() if probability > 0.5], "probabilities": row}
            for row in rows
        ]
