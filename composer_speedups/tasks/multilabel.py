"""Multi-label classification of texts and pairs of texts."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelF1Score

from composer_speedups.core.errors import DataError
from composer_speedups.tasks.labels import TaskWithClasses, as_integer
from composer_speedups.tasks.metrics import MeanLoss, MultilabelMacroF1
from composer_speedups.tasks.settings import MultilabelSettings
from composer_speedups.tasks.task import Example, shown

_FLAGS = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}  # a value, or its text in a CSV file
_SEPARATORS = (";", "|", ",")
# a list, tuple or set, or what may pass for one
_WRITTEN = re.compile(r"\[.*|\{.*|\(.*[,'\"].*\)|\(\)|(set|frozenset)\(\)|\w+\(\s*[\[{('\"].*", re.DOTALL)
_EXPECTED = "a list of labels, or text such as billing;tech (data.label_columns names columns of 0 and 1)"


def _written_list(text: str) -> list[Any] | None:
    """The labels of a list, tuple or set that is written as JSON or as Python writes it; None for other text."""
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(text)
        return parsed if isinstance(parsed, list) else None
    with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = ast.literal_eval(text)
        kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(text).readline)]
        texts = sum(isinstance(item, str) for item in value)
        # NumPy writes no commas, and Python joins 'billing' 'tech' to one text
        if isinstance(value, (list, tuple, set)) and kinds.count(tokenize.STRING) == texts:
            return list(value)
    return None


def _as_list(value: Any, separator: str | None) -> Any:
    """The labels of a text; a text that looks like a list but is not one, and other values, are returned unchanged."""
    if not isinstance(value, str):
        return value
    if _WRITTEN.fullmatch(value.strip()):
        written = _written_list(value.strip())
        return value if written is None else written
    names = value.split(separator) if separator else [value]
    return [name.strip() for name in names if name.strip()]


class Multilabel(MultilabelSettings, TaskWithClasses):
    """Multi-label classification with lists of names or a column of 0 and 1 per label; binary cross entropy; F1 and
    mean average precision.

    A list may be written as text, for files of text: as JSON or as Python writes lists, tuples and sets, or as names
    between ``;``, ``|`` or ``,`` (the first of these that the column has). Empty text has no label.
    """

    def reset(self) -> None:
        super().reset()
        if self.label_columns:
            self.label_column = None
            self.labels = self.labels or list(self.label_columns)

    def example(self, row: Mapping[str, Any], where: str, *, training: bool) -> Example:
        example = super().example(row, where, training=training)
        if self.label_columns:
            example["labels"] = [self._flag(row.get(column), where, column) for column in self.label_columns]
        return example

    def learn(self, columns: Mapping[str, Sequence[Any]], declared: Mapping[str, list[str]], where: str) -> None:
        if self.label_column is not None:
            values = columns[self.label_column]
            texts = [value for value in values if isinstance(value, str) and not _WRITTEN.fullmatch(value.strip())]
            separator = next((mark for mark in _SEPARATORS if any(mark in text for text in texts)), None)
            lists = [_as_list(value, separator) for value in values]
            columns = {**columns, self.label_column: [names for names in lists if isinstance(names, (list, tuple))]}
        super().learn(columns, declared, where)

    def label(self, value: Any, where: str) -> list[float]:
        labels = self._split(value)
        present = {*self.classes_of(labels, where, _EXPECTED)}
        integers = [integer for label in labels if (integer := as_integer(label)) is not None]
        if len({*integers}) < len(integers):
            raise DataError(
                f"{where}: {self.label_column} is {shown(value)}, which has an integer twice",
                fix="write the names of the labels, or 0 and 1 in a column for each (data.label_columns)",
            )
        return [float(i in present) for i in range(len(self.classes))]

    def classes_in(self, label: Sequence[float]) -> Iterable[int]:
        return [k for k, flag in enumerate(label) if flag]

    def check_labels(self, values: Sequence[Any], where: str) -> None:
        lists = [self._split(value) for value in values]
        super().check_labels(lists, where)
        if all(isinstance(names, list) and [*map(as_integer, names)] in ([0, 1], [1, 0]) for names in lists):
            raise DataError(
                f"{where}: {self.label_column} has 0 and 1 in each row; write the names of the labels, or a column for "
                "each label (data.label_columns)"
            )

    def _split(self, value: Any) -> Any:
        """A list of labels that is written as text; it is split at the first mark that gives known labels."""
        if isinstance(value, str) and value.strip() in self.classes:
            return [value.strip()]
        whole = _as_list(value, None)
        if not isinstance(value, str) or whole != [value.strip()]:
            return whole
        parts = [_as_list(value, mark) for mark in _SEPARATORS if mark in value]
        return next((names for names in parts if {*names} <= {*self.classes}), [*parts, whole][0])

    def _flag(self, value: Any, where: str, column: str) -> float:
        flag = _FLAGS.get(str(value).lower())
        if flag is None:
            raise DataError(f"{where}: {column} is {shown(value)}", fix="every label must be 0 or 1")
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
            metrics["MacroF1"] = MultilabelMacroF1(self.classes)
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
