"""Load samples from the hub, from files or from the built-in generator, check each row, or generate random tokens."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow
from datasets import Dataset

from composer_speedups.core.errors import DataError, first_line
from composer_speedups.data.builtin import builtin_samples
from composer_speedups.data.paths import find_files
from composer_speedups.data.reader import (
    ClassNames,
    Needed,
    Row,
    check_columns,
    class_names,
    declared_classes,
    hub_dataset,
    load_rows,
    no_rows,
    saved_dataset,
    with_class_names,
)
from composer_speedups.data.summary import DataSummary, DroppedRows, Problem, invalid_rows
from composer_speedups.tasks.labels import TaskWithClasses
from composer_speedups.tasks.settings import GENERATED, DataConfig
from composer_speedups.tasks.task import Example, Task

Arrays = npt.NDArray[Any]


class _Split(NamedTuple):
    rows: list[Row]  # with names of classes instead of their integers
    declared: ClassNames  # in the data set's own order
    where: str  # the data set, for errors

    def teach(self, task: Task, *, training: bool = True, trial: bool = False) -> None:
        """Let the task learn its labels; a ``trial`` includes labels of rows that will be dropped."""
        if not isinstance(task, TaskWithClasses):
            return
        found = task.lacks_classes and task.label_column not in self.declared and not trial
        columns = [column for column, _ in task.columns(training=training)]
        task.learn({name: [row.get(name) for row in self.rows] for name in columns}, self.declared, self.where)
        if found:
            task.check_classes(self.where)

    def checked(
        self, task: Task, on_invalid: str, summary: DataSummary, *, training: bool, places: Sequence[int] | None = None
    ) -> dict[int, Example]:
        """Map the indices of valid rows, of all rows or ``places``, to samples; refuse or drop invalid rows."""
        examples, invalid = {}, list[Problem]()
        if places is None and isinstance(task, TaskWithClasses) and task.reads_label(training=training):
            task.check_labels([row.get(str(task.label_column)) for row in self.rows], self.where)
        places = range(len(self.rows)) if places is None else places
        for place in places:
            try:
                examples[place] = task.example(self.rows[place], f"row {place + 1}", training=training)
            except DataError as error:
                invalid.append((error.who, error.fix))
        if invalid and (on_invalid == "stop" or not examples):
            fix = "data.on_invalid=drop leaves out invalid rows" if examples else "use a file with valid rows"
            raise invalid_rows(self.where, len(places), invalid, fix)
        if invalid:
            summary.dropped.append(DroppedRows(self.where, len(places), invalid))
        return examples


def load_samples(config: DataConfig, task: Task, summary: DataSummary | None = None) -> tuple[Dataset, Dataset | None]:
    """Training and validation samples of :meth:`.Task.example`; the task learns its labels from the former."""
    summary = summary or DataSummary()
    needed = task.columns(training=True)
    if config.eval_fraction is not None:  # the rows to validate on are among them
        needed = [*dict.fromkeys([*needed, *task.columns(training=False)])]
    train = _split(config, task, "train", needed)
    assert train is not None  # ensured by the schema's checks
    held: _Split | None = train
    drawn = None
    if config.eval_fraction is None:
        held = _split(config, task, "eval", task.columns(training=False))
    trial = task if config.on_invalid == "stop" else copy.copy(task)
    train.teach(trial, trial=trial is not task)  # from all rows, because a class may occur only in those held out
    examples = train.checked(trial, config.on_invalid, summary, training=True)
    if trial is not task:  # a label may occur only in rows that were dropped, and is then no class
        kept = train._replace(rows=[train.rows[place] for place in examples])
        kept.teach(task)
        if len(kept.rows) < len(train.rows):
            examples = {place: task.example(train.rows[place], f"row {place + 1}", training=True) for place in examples}
    if config.eval_fraction is not None:
        drawn = _held_out(train, examples, task, config)
        examples = {place: examples[place] for place in examples.keys() - drawn}
    samples = Dataset.from_list(task.prepared([examples[place] for place in sorted(examples)], training=True))
    validation = _validation_samples(held, task, config, summary, drawn)
    return _draw(samples, config, config.train_samples), validation


def load_validation(config: DataConfig, task: Task, summary: DataSummary | None = None) -> Dataset | None:
    """The validation samples, from which the task learns its labels, because a stream cannot be scanned in advance."""
    held = _split(config, task, "eval", task.columns(training=False))
    if held is not None:
        held.teach(task, training=False)
    return _validation_samples(held, task, config, summary or DataSummary())


def labelled_samples(rows: list[Row], where: str, task: Task, summary: DataSummary) -> tuple[Dataset, list[int]]:
    """The samples of a file's valid rows, as :func:`load_validation` returns them, and the indices of these rows. The
    task already knows its classes."""
    examples = _split_of(rows, {}, where).checked(task, "drop", summary, training=False)
    return Dataset.from_list(task.prepared([*examples.values()], training=False)), [*examples]


def _validation_samples(
    held: _Split | None, task: Task, config: DataConfig, summary: DataSummary, places: Iterable[int] | None = None
) -> Dataset | None:
    if held is None:
        return None
    chosen = None if places is None else sorted(places)
    examples = held.checked(task, config.on_invalid, summary, training=False, places=chosen)
    samples = Dataset.from_list(task.prepared([*examples.values()], training=False))
    return _draw(samples, config, config.eval_samples, whole=task.groups_samples)


def _split(config: DataConfig, task: Task, split: str, needed: Sequence[Needed]) -> _Split | None:
    """The rows of the split ``train`` or ``eval``; None if the config names none."""
    if config.source == "builtin":
        count = getattr(config, f"{split}_samples")
        columns = builtin_samples(task.name, count or GENERATED, config.seed, split, config.length_scale)
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return _Split(rows, {}, "data.source: builtin")
    if config.source == "hub":
        name = getattr(config, f"{split}_split")
        return None if name is None else _from_dataset(*hub_dataset(config, name), needed)
    key, name = f"data.{split}_file", getattr(config, f"{split}_file")
    if name is None:
        return None
    where = f"{key}: {name}"
    if os.path.isdir(os.path.expanduser(name)):
        return _from_dataset(saved_dataset(name, key), where, needed)
    paths = find_files(name, key)
    declared = declared_classes(paths[0], key)
    return _split_of(load_rows(paths, key, needed, declared), declared, where)


def _from_dataset(dataset: Dataset, where: str, needed: Sequence[Needed]) -> _Split:
    check_columns(dataset.column_names, needed, where)
    try:
        rows = dataset.select_columns([column for column, _ in needed]).to_list()
    except (pyarrow.ArrowException, ValueError) as error:  # such as invalid UTF-8
        raise DataError(f"{where}: its columns cannot be read ({first_line(error)})") from error
    declared = class_names(dataset.features)
    return _split_of([with_class_names(row, declared) for row in rows], declared, where)


def _split_of(rows: list[Row], declared: ClassNames, where: str) -> _Split:
    if not rows:
        raise no_rows(where)
    return _Split(rows, declared, where)


def random_rows(count: int, seed: int, split: str, length: int, tokenizer: Any, classes: int = 2) -> Dataset:
    """Rows of random token ids, all of one length, with random labels, to measure memory and speed."""
    generator = np.random.default_rng([seed, zlib.crc32(split.encode())])
    plain = np.setdiff1d(np.arange(len(tokenizer), dtype=np.int32), tokenizer.all_special_ids)
    ids = generator.choice(plain, size=count * length).astype(np.int32)
    starts = np.arange(0, len(ids) + 1, length, dtype=np.int32)
    rows = pyarrow.ListArray.from_arrays(starts, ids)
    return Dataset(pyarrow.table({"input_ids": rows, "labels": generator.integers(0, classes, count)}))


def _held_out(split: _Split, examples: Mapping[int, Example], task: Task, config: DataConfig) -> set[int]:
    """Draw the places of the rows to validate on from those of the valid rows."""
    places = [*examples]
    total = len(places)
    count = min(max(round(config.eval_fraction * total), 1), total - 1)  # type: ignore[operator]
    if count < 1:
        raise DataError(f"{split.where} has only one row, which data.eval_fraction cannot split")
    if task.groups_samples:
        drawn = _whole_groups([split.rows[place].get(task.text_columns[0]) for place in places], count, config.seed)
    else:
        drawn = _stratified([example.get("labels") for example in examples.values()], count, config.seed)
    if len(drawn) == total:
        raise DataError(f"{split.where} has rows of one {task.text_columns[0]}, which data.eval_fraction cannot split")
    return {places[number] for number in drawn.tolist()}


def _stratified(labels: Sequence[Any], count: int, seed: int) -> Arrays:
    """Draw ``count`` rows at random, stratified (within one row) if each label is a class. A class's only row is drawn
    last."""
    order = np.random.default_rng(seed).permutation(len(labels))
    if not isinstance(labels[0], int):
        return order[:count]
    class_N = np.array(labels)
    _, index_N, rows_N = np.unique(class_N, return_inverse=True, return_counts=True)
    several = order[rows_N[index_N[order]] > 1]
    if len(several) < count:
        return order[:count]
    by_class = several[np.argsort(class_N[several], kind="stable")]  # each class in random order
    return by_class[((np.arange(count) + 0.5) * len(by_class) / count).astype(int)]


def _draw(dataset: Dataset, config: DataConfig, samples: int | None, *, whole: bool = False) -> Dataset:
    """Draw random rows; all rows if there are fewer. ``whole`` keeps groups together."""
    if samples is None or samples >= len(dataset):
        return dataset
    if whole:
        return dataset.select(_whole_groups(dataset["text_1"], samples, config.seed)).flatten_indices()
    return dataset.shuffle(seed=config.seed).select(range(samples)).flatten_indices()


def _whole_groups(keys: Sequence[Any], count: int, seed: int) -> Arrays:
    """Draw groups at random, and return all rows of each in order: at most ``count`` rows, or one group."""
    numbers: dict[str, int] = {}
    group_N = np.array([numbers.setdefault(str(key), len(numbers)) for key in keys])
    order = np.random.default_rng(seed).permutation(len(numbers))
    ends = np.bincount(group_N)[order].cumsum()
    return np.flatnonzero(np.isin(group_N, order[: max(1, int((ends <= count).sum()))]))
