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
from composer_speedups.tasks.metrics import MeanLoss
from composer_speedups.tasks.task import Example, Labels, Task, shown

__all__ = ["Multilabel"]

_FLAGS = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}  # a value, or its text in a CSV file


@dataclass(kw_only=True)
class Multilabel(Task):
    """Multi-label classification with lists of names or a column of 0 and 1 per label; binary cross entropy; F1 and
    mean average precision.

    Attributes:
        labels: Names of the labels in the order of the head's outputs; None for those of the training samples.
        label_columns: Columns of 0 and 1, one per label, instead of ``label_column``.
    """

    labels: Sequence[str] | None = None
    label_columns: Sequence[str] | None = None

    name = "multilabel"
    default_label = "labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_columns:
            self.label_column = None
            self.labels = list(self.labels or self.label_columns)
            if len(self.labels) != len(self.label_columns):
                raise ConfigError(
                    f"data.labels names {len(self.labels)} labels for {len(self.label_columns)} data.label_columns; "
                    "name one per column, or remove it"
                )

    def columns(self, *, training: bool) -> list[tuple[str, str]]:
        found = super().columns(training=training)
        return [*found, *((column, "data.label_columns") for column in self.label_columns or ())]

    def learn(self, columns: Mapping[str, Sequence[Any]], declared: Mapping[str, list[str]], where: str) -> None:
        if self.labels is not None:
            return
        column = str(self.label_column)
        values = [value for row in columns[column] if isinstance(row, (list, tuple)) for value in row]
        self.labels = Labels.of(values, declared.get(column), where, f"the column {column}").names

    def example(self, row: Mapping[str, Any], where: str, *, training: bool) -> Example:
        found = super().example(row, where, training=training)
        if self.label_columns:
            found["labels"] = [self._flag(row.get(column), where, column) for column in self.label_columns]
        return found

    def label(self, value: Any, where: str) -> list[float]:
        if not isinstance(value, (list, tuple)):
            raise DataError(f"{where}: {self.label_column} is {shown(value)}; it must be a list of labels (or none)")
        labels = Labels(list(self.labels or ()))
        held = {labels.index(each, where, str(self.label_column), among=True) for each in value}
        return [float(i in held) for i in range(len(labels.names))]

    def _flag(self, value: Any, where: str, column: str) -> float:
        flag = _FLAGS.get(str(value).lower())
        if flag is None:
            raise DataError(f"{where}: {column} is {shown(value)}; it must be 0 or 1")
        return flag

    def head_settings(self) -> dict[str, Any]:
        return {"problem_type": "multi_label_classification", **Labels(list(self.labels or ())).settings()}

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        settings: dict[str, Any] = {"num_labels": len(self.labels or ()), "validate_args": False}
        found: dict[str, Metric] = {
            "MicroF1": MultilabelF1Score(average="micro", **settings),
            "BinaryCrossEntropy": MeanLoss(F.binary_cross_entropy_with_logits),
        }
        if not training:
            found["MacroF1"] = MultilabelF1Score(average="macro", **settings)
            found["MeanAveragePrecision"] = MultilabelAveragePrecision(average="macro", **settings)
        return found

    def update_metric(self, metric: Metric, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> None:
        if isinstance(metric, MeanLoss):
            metric.update(logits, labels)
        else:  # torchmetrics would check on the host whether the values are probabilities
            metric.update(logits.float().sigmoid(), labels.long())

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        names = list(self.labels or ())
        return [
            {
                "labels": [name for name, probability in zip(names, row_K, strict=True) if probability > 0.5],
                "probabilities": dict(zip(names, row_K, strict=True)),
            }
            for row_K in logits.float().sigmoid().tolist()
        ]
