"""What every task is made of: the columns it reads, its labels, token ids, head, loss, metrics and predictions.

A task's file in this folder holds one subclass of :class:`Task`; :func:`build_task` finds it by name.

Letters in names of arrays: R rows (samples) of a batch, S token positions, K labels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torchmetrics import Metric

from composer_speedups.core.errors import ConfigError, DataError

__all__ = ["Example", "Labels", "Task", "build_task", "joined", "number", "shown", "task_class"]

Example = dict[str, Any]


@dataclass(kw_only=True)
class Task:
    """A task with its settings. Their names and defaults are those of the config keys under ``data`` and ``model``.

    Attributes:
        text_columns: Columns of the texts of a sample; None takes ``default_texts``.
        label_column: Column of the label; None takes ``default_label``.
        truncation: Which text of a pair is cut to the maximum length: ``longest_first``, ``only_first``,
            ``only_second``.
    """

    text_columns: Sequence[str] | None = None
    label_column: str | None = None
    truncation: str = "longest_first"

    name: ClassVar[str]
    default_texts: ClassVar[tuple[str, ...]] = ("text",)
    default_label: ClassVar[str | None] = "label"
    most_texts: ClassVar[int | None] = 2
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    loss_per_token: ClassVar[bool] = False  # the loss is a mean over labelled tokens, and not over samples
    splits_words: ClassVar[bool] = False  # the texts are lists of words
    pools_real_tokens: ClassVar[bool] = False  # what is made of a bare encoder's vectors leaves out those of padding
    groups_samples: ClassVar[bool] = False  # those with the same first text are evaluated together

    def __post_init__(self) -> None:
        self.text_columns = list(self.text_columns or self.default_texts)
        self.label_column = self.label_column or self.default_label
        if self.most_texts is not None and len(self.text_columns) > self.most_texts:
            raise ConfigError(
                f"data.text_columns: task {self.name} reads {self.most_texts} at most, not {len(self.text_columns)}"
            )

    @property
    def needs_whole_batch(self) -> bool:
        """The samples of a batch take part in one another's loss, so a batch cannot be split into micro-batches."""
        return False

    @property
    def needs_every_sample(self) -> bool:
        """Samples are made of all rows together, so they cannot be streamed."""
        return False

    @property
    def lacks_classes(self) -> bool:
        """The names of the classes are still to be learned, by :meth:`learn`."""
        return "labels" in vars(self) and vars(self)["labels"] is None

    # --- data ---------------------------------------------------------------------------------------------------------

    @property
    def texts(self) -> list[str]:
        """The text columns."""
        assert self.text_columns is not None
        return list(self.text_columns)

    def columns(self, *, training: bool) -> list[tuple[str, str]]:
        """Columns that the samples must have, each with the config key that names it."""
        named = [(column, "data.text_columns") for column in self.texts]
        return named if self.label_column is None else [*named, (self.label_column, "data.label_column")]

    def learn(self, columns: Mapping[str, Sequence[Any]], declared: Mapping[str, list[str]], where: str) -> None:
        """Take from the training samples what the settings leave open, such as the names of the classes.

        Args:
            columns: Those of :meth:`columns`, raw.
            declared: Column → the class names that the dataset itself declares, whose integers are names already.
            where: The dataset, for errors.
        """

    def example(self, row: Mapping[str, Any], where: str, *, training: bool) -> Example:
        """A raw row, checked: ``text_1``, ``text_2``, … and ``labels``.

        Raises:
            DataError: One line that names ``where``, the column and the value.
        """
        found = {f"text_{i}": self.text(row, column, where) for i, column in enumerate(self.texts, start=1)}
        if self.label_column is not None:
            found["labels"] = self.label(row.get(self.label_column), where)
        return found

    def text(self, row: Mapping[str, Any], column: str, where: str) -> Any:
        """The text of one column, checked."""
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: {column} is {shown(text)}; every sample needs text there")
        return text

    def label(self, value: Any, where: str) -> Any:
        """A raw label, checked and turned into what the loss takes."""
        raise NotImplementedError

    def prepared(self, examples: list[Example], *, training: bool) -> list[Example]:
        """The samples, made of all checked rows together; by default these themselves."""
        return examples

    def encode(self, examples: Mapping[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        """Token ids of checked samples, cut to ``max_length``, and what else a batch is made of.

        Returns:
            ``input_ids`` and other lists per token, ``labels`` and other numbers (or lists of one length) per sample.
        """
        texts = [examples[key] for key in examples if key.startswith("text_")]
        return {**self.tokens(texts, tokenizer, max_length), **_without_texts(examples)}

    def tokens(self, texts: list[list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[Any]]:
        """Token ids of single texts, or of pairs with their token types, as the head reads them."""
        kind = self.truncation if len(texts) == 2 else "longest_first"
        unread = {"return_attention_mask": False} | ({} if len(texts) == 2 else {"return_token_type_ids": False})
        try:
            encoded = tokenizer(*texts, truncation=kind, max_length=max_length, **unread)
            fits = max(map(len, encoded["input_ids"]), default=0) <= max_length
        except Exception as error:  # tokenizers' own; the ones in Python only warn
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
        """The tokenized samples as they are drawn from; by default as they are."""
        return rows

    def collator(self, pad: Any, tokenizer: Any, *, training: bool) -> Any:
        """What makes a batch of rows; by default ``pad``, which pads each list per token."""
        return pad

    # --- model --------------------------------------------------------------------------------------------------------

    def head_settings(self) -> dict[str, Any]:
        """Settings of the model's configuration: labels and kind of problem."""
        return {}

    def model_arguments(self, kind: type) -> dict[str, Any]:
        """Arguments of the model's class beside its configuration."""
        return {}

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        """The model's outputs for a batch, of which ``logits`` go to the metrics."""
        return model(**batch)

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        """The loss of a batch, a scalar tensor; by default the one that the model computed."""
        return outputs["loss"]

    def metrics(self, *, training: bool) -> dict[str, Metric]:
        """Fresh metrics by the names they are logged under; those of training are computed at every batch."""
        raise NotImplementedError

    def update_metric(self, metric: Metric, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> None:
        metric.update(logits, labels)

    def predictions(self, logits: Tensor, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What a finished model says of each sample of a batch, as plain values."""
        raise NotImplementedError

    def export(self, folder: Path, hidden: int, max_length: int) -> None:
        """Write beside transformers' files in ``folder`` what another library needs to load the model."""


def build_task(model: Any, data: Any) -> Task:
    """The task that ``model.task`` names, with its settings.

    Args:
        model: The keys under ``model``, a :class:`.ModelConfig`.
        data: The keys under ``data``, a :class:`composer_speedups.data.config.DataConfig`.

    Raises:
        ConfigError: Settings that the task cannot use.
    """
    kind = task_class(model.task)
    known = {field.name for field in fields(kind)}
    settings = {**vars(data), **vars(model), **({} if model.loss is None else {"loss_name": model.loss})}
    return kind(**{key: value for key, value in settings.items() if key in known})


def task_class(name: str) -> type[Task]:
    """The class of a task by its name in a config."""
    module = importlib.import_module(f"composer_speedups.tasks.{name}")
    return next(kind for kind in vars(module).values() if isinstance(kind, type) and vars(kind).get("name") == name)


@dataclass
class Labels:
    """Names of the classes, in the order of the head's outputs."""

    names: list[str]

    @classmethod
    def of(cls, values: Sequence[Any], declared: list[str] | None, where: str, column: str) -> Labels:
        """Those that the dataset declares, or the distinct values in order.

        Raises:
            DataError: Values that are no class, or of which there is one only.
        """
        if declared is None:
            distinct = {plain for value in values if (plain := _plain(value)) is not None}
            numbers = all(isinstance(value, int) for value in distinct)
            if numbers:
                distinct -= {-1}  # datasets' sign for a row without a label
            declared = [str(value) for value in (sorted(distinct) if numbers else sorted(distinct, key=str))]
        if len(declared) < 2:
            raise DataError(
                f"{where}: {column} has the one class {', '.join(declared) or 'of no row'}; there must be two or more "
                "(name them all with data.labels)"
            )
        return cls(declared)

    def index(self, value: Any, where: str, column: str, *, among: bool = False) -> int:
        """The position of a raw label: a name, or the position itself where names are no numbers.

        ``among`` says that it is one of several in the column of its row.
        """
        plain = _plain(value)
        if str(plain) in self.names:
            return self.names.index(str(plain))
        positions = isinstance(plain, int) and not any(_is_number(name) for name in self.names)
        if positions and 0 <= plain < len(self.names):  # type: ignore[operator]
            return int(plain)  # type: ignore[arg-type]
        if isinstance(value, float) and not value.is_integer():
            raise DataError(f"{where}: {column} is {shown(value)}, and no class; for numbers set model.task=regression")
        raise DataError(
            f"{where}: {column} {'holds' if among else 'is'} {shown(value)}; it must be one of "
            f"{', '.join(self.names[:20])} (data.labels)"
        )

    def settings(self) -> dict[str, Any]:
        """The settings of a transformers configuration that hold them."""
        return {"id2label": dict(enumerate(self.names)), "label2id": {name: i for i, name in enumerate(self.names)}}


def joined(texts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Several texts of each sample as one list of tokens, and ``lengths``, the tokens of each text."""
    rows = len(texts[0]["input_ids"])
    found = {key: [[x for text in texts for x in text[key][row]] for row in range(rows)] for key in texts[0]}
    return {**found, "lengths": [[len(text["input_ids"][row]) for text in texts] for row in range(rows)]}


def number(value: Any, where: str, column: str) -> float:
    """A raw value as a finite number.

    Raises:
        DataError: It is none.
    """
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        raise DataError(f"{where}: {column} is {shown(value)}; it must be a finite number")
    return found


def shown(value: Any) -> str:
    """A raw value for an error: ``empty``, or its start."""
    return "empty" if value is None or (isinstance(value, str) and not value.strip()) else repr(value)[:60]


def _without_texts(examples: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: values for key, values in examples.items() if not key.startswith("text_")}


def _plain(value: Any) -> int | str | None:
    """A label as an integer or text; None for what is neither."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():  # a CSV column with a gap is read as floats
        return int(value)
    if isinstance(value, int):
        return value
    return value.strip() if isinstance(value, str) and value.strip() else None


def _is_number(name: str) -> bool:
    return name.lstrip("+-").isdigit()
