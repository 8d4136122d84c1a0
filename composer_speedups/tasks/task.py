"""The base class of tasks: columns, labels, token ids, head, loss, metrics and predictions.

A task's file in this folder defines one subclass of :class:`Task`; :func:`build_task` finds it by name.

Letters in names of arrays: R rows (samples) of a batch, S token positions, K labels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from composer_speedups.core.errors import DataError
from composer_speedups.packing.rows import IGNORED
from composer_speedups.tasks.settings import TaskSettings

Example = dict[str, Any]

_LARGEST = torch.finfo(torch.float32).max


class Task(TaskSettings):
    """A task with its settings, which have the names and defaults of the config keys under ``data`` and ``model``.

    A task's class derives from its settings, which do not import torch, and from this class.
    """

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    loss_per_token: ClassVar[bool] = False  # the loss is a mean over labelled tokens instead of samples
    pools_real_tokens: ClassVar[bool] = False  # the head on a bare encoder ignores outputs at padding positions
    groups_samples: ClassVar[bool] = False  # samples with the same first text are evaluated together

    def settings(self, max_length: int) -> dict[str, Any]:
        """The content of task.json: the keys under ``model`` and ``data`` that the task reads.

        The names of the classes are not among them, because the model's ``config.json`` has them.
        """
        sections: dict[str, Any] = {"model": {"task": self.name}, "data": {"max_length": max_length}}
        for name, field in type(self).model_fields.items():
            section, _, key = self.key_of(field.alias or name).partition(".")
            if key not in ("task", "labels"):
                sections[section][key] = getattr(self, name)
        return sections

    # --- data ---------------------------------------------------------------------------------------------------------

    def learn_frequencies(self, labels: Sequence[Any]) -> None:
        """Determine settings that depend on how often each label occurs, such as balanced class weights.

        Args:
            labels: The labels of all training samples, as :meth:`label` returns them.
        """

    def example(self, row: Mapping[str, Any], where: str, *, training: bool) -> Example:
        """Check a raw row and convert it to ``text_1``, ``text_2``, … and ``labels``.

        Raises:
            DataError: Names ``where``, the column and the value.
        """
        columns = self.texts_of(training=training)
        example = {f"text_{i}": self.text(row, column, where) for i, column in enumerate(columns, start=1)}
        if self.reads_label(training=training):
            example["labels"] = self.label(row.get(str(self.label_column)), where)
        return example

    def best_constant(self, labels: Sequence[Any]) -> dict[str, Any] | None:
        """The best constant predictions for the labels of all tokenized samples, each by name and followed by its
        metric: ``{"label": "spam", "accuracy": 0.6}``; None for a task without any."""
        return None

    def text(self, row: Mapping[str, Any], column: str, where: str) -> Any:
        """Check and return the text of one column."""
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: {column} is {shown(text)}", fix="every sample needs text")
        return text

    def label(self, value: Any, where: str) -> Any:
        """Check a raw label and convert it for the loss; by default a number."""
        return number(value, where, str(self.label_column))

    def prepared(self, examples: list[Example], *, training: bool) -> list[Example]:
        """Build the samples from all checked rows; by default these are returned unchanged."""
        return examples

    def encode(self, examples: Mapping[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        """Tokenize checked samples, truncated to ``max_length``.

        Returns:
            ``input_ids`` and other lists per token, ``labels`` and other numbers (or lists of one length) per sample.
        """
        texts = {key: values for key, values in examples.items() if key.startswith("text_")}
        others = {key: values for key, values in examples.items() if key not in texts}
        return {**self.tokens([*texts.values()], tokenizer, max_length), **others}

    def tokens(self, texts: list[list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        """Token ids of single texts, or of pairs with their token types."""
        kind = getattr(self, "truncation", "longest_first") if len(texts) == 2 else "longest_first"
        unread = {"return_attention_mask": False} | ({} if len(texts) == 2 else {"return_token_type_ids": False})
        try:
            encoded = tokenizer(*texts, truncation=kind, max_length=max_length, **unread)
            fits = max(map(len, encoded["input_ids"]), default=0) <= max_length
        except Exception as error:  # the Rust tokenizers have no class for it; those in Python only warn
            if "Truncation error" not in str(error):
                raise
            fits = False
        if not fits:
            raise DataError(
                f"data.truncation: {kind} cannot cut every pair to data.max_length={max_length}, which the other text "
                "alone exceeds; use longest_first, or a larger length"
            )
        return {key: encoded[key] for key in ("input_ids", "token_type_ids") if key in encoded}

    def arranged(self, rows: Any, max_length: int, *, training: bool) -> Any:
        """Rearrange the tokenized samples before batches are drawn; by default they are returned unchanged."""
        return rows

    def collator(self, pad: Any, tokenizer: Any, *, training: bool) -> Any:
        """The function that builds a batch from rows; by default ``pad``, which pads each list per token."""
        return pad

    # --- model --------------------------------------------------------------------------------------------------------

    def head_settings(self) -> dict[str, Any]:
        """Settings of the model's configuration: labels and problem type."""
        return {}

    def model_arguments(self, kind: type) -> dict[str, Any]:
        """Arguments of the model's class in addition to its configuration."""
        return {}

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        """The model's outputs for a batch; their ``logits`` are passed to the metrics."""
        return model(**batch)

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        """The loss of a batch, a scalar tensor; by default the one computed by the model."""
        return outputs["loss"]

    @property
    def weights_losses(self) -> bool:
        """Whether :meth:`loss` is a weighted mean, so that micro-batches and ranks count by :meth:`loss_weight` instead
        of by their samples."""
        return self.loss_per_token

    def loss_weight(self, batch: Mapping[str, Any]) -> float:
        """The sum of weights by which :meth:`loss` divides, for a batch or a part; by default its labelled tokens.

        Composer reads it with ``accumulate_train_batch_on_tokens``, as ``loss_generating`` of the ``DataSpec``'s
        ``get_num_tokens_in_batch``.
        """
        return int((batch["labels"] != IGNORED).sum())

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        """New metrics by the names under which they are logged. Training metrics are computed for every batch."""
        raise NotImplementedError

    def update_metric(self, metric: Metric, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> None:
        metric.update(logits, labels)

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The predictions of a trained model for each sample of a batch, as plain values."""
        raise NotImplementedError

    def with_text(self, prediction: dict[str, Any], texts: Sequence[Any]) -> dict[str, Any]:
        """The prediction for a sample, related to its texts; by default it is returned unchanged."""
        return prediction

    def export(self, folder: Path, hidden: int, max_length: int) -> None:
        """Write the files that another library needs to load the model, next to those of transformers in ``folder``."""


def build_task(settings: TaskSettings) -> Task:
    return task_class(settings.name)(**{name: getattr(settings, name) for name in type(settings).model_fields})


def task_class(name: str) -> type[Task]:
    """The class of a task by its name in the config."""
    module = importlib.import_module(f"composer_speedups.tasks.{name}")
    kinds = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Task))
    return next(kind for kind in kinds if kind.__module__ == module.__name__ and kind.name == name)


def joined(texts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Join the texts of each sample to one list of tokens, with ``lengths``, the number of tokens of each text."""
    rows = len(texts[0]["input_ids"])
    tokens = {key: [[x for text in texts for x in text[key][row]] for row in range(rows)] for key in texts[0]}
    return {**tokens, "lengths": [[len(text["input_ids"][row]) for text in texts] for row in range(rows)]}


def number(value: Any, where: str, column: str) -> float:
    """A raw value as a number that is finite in float32. Text may not have the underscores of Python's literals."""
    try:
        parsed = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        parsed = math.nan
    if not abs(parsed) <= _LARGEST:
        raise DataError(f"{where}: {column} is {shown(value)}", fix="every label must be a finite number")
    return parsed


def shown(value: Any) -> str:
    """A raw value for an error message: ``empty``, or its beginning."""
    return "empty" if value is None or (isinstance(value, str) and not value.strip()) else repr(value)[:60]
