"""What is known of a run's samples before training, for the console and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from datasets import Dataset

from composer_speedups.core.errors import DataError
from composer_speedups.tasks.labels import LOOKS_MISSING, TaskWithClasses
from composer_speedups.tasks.task import Task

_RARE = 10  # validation rows of a class, below which its metrics say little
_MOST_LISTED = 10  # invalid rows and rare classes that messages and the report list

Problem = tuple[str, str]  # error and advice (may be ""): ("row 6: text is empty", "every sample needs text")


@dataclass(frozen=True)
class DroppedRows:
    """Invalid rows that ``data.on_invalid: drop`` left out."""

    where: str  # the file or dataset with its config key
    rows: int  # with the invalid ones
    problems: Sequence[Problem]

    def __str__(self) -> str:
        shown = _listed([problem for problem, _ in self.problems])
        return f"{len(self.problems):,} of {self.rows:,} rows of {self.where} ({shown})"

    def report(self) -> dict[str, Any]:
        first = [problem for problem, _ in self.problems[:_MOST_LISTED]]
        return {"source": self.where, "rows": self.rows, "dropped": len(self.problems), "first": first}


@dataclass(frozen=True)
class Truncation:
    """How many training samples ``data.max_length`` truncates."""

    fraction: float  # of the samples
    length_for_95_percent: int  # the max_length that would keep 95% of them whole
    exact: bool  # all samples were measured, and not a part of them

    def __str__(self) -> str:
        if self.exact and not self.fraction:
            return "no sample is truncated"
        about = "" if self.exact else "about "
        share = f"{about}{self.fraction:.0%}" if self.fraction >= 0.01 else f"{about}{self.fraction:.1%}"
        longer = f"; {self.length_for_95_percent:,} tokens would keep 95% whole" if self.fraction > 0.05 else ""
        return f"{share} of the samples are truncated{longer}"


@dataclass(frozen=True)
class DataCheck:
    """Texts that occur more than once, and the metrics of constant predictions; None for what a task does not have.

    A text is the whole of a row: of a pair, both texts together.
    """

    duplicates: Mapping[str, int]  # split → rows with a text that an earlier row of the split has
    on_both_sides: int | None  # validation rows with a text that is also trained on
    differing_labels: int | None  # texts to which the rows of either split give different labels
    rare_classes: Mapping[str, Mapping[str, int]] | None  # class → split → rows, if fewer than ten validate
    constant: Mapping[str, Any] | None  # the best constant predictions for the validation rows, each with its metric

    def __str__(self) -> str:

        def by_split(counts: Mapping[str, int]) -> str:
            return ", ".join(f"{rows:,} to {name} on" for name, rows in counts.items())

        rare = [
            f"{name} ({by_split(rows)}{'; a missing value?' if LOOKS_MISSING.fullmatch(name) else ''})"
            for name, rows in (self.rare_classes or {}).items()
        ]
        counts = {
            "duplicate texts": by_split({name: rows for name, rows in self.duplicates.items() if rows}) or "none",
            "validation texts that are also trained on": self.on_both_sides,
            "texts with different labels": self.differing_labels,
            f"classes with fewer than {_RARE} validation rows": rare and _listed(rare),
        }
        found = [
            f"{name}: {count if isinstance(count, str) else f'{count:,}'}" for name, count in counts.items() if count
        ]
        if self.constant:
            pairs = iter(self.constant.items())
            for (what, answer), (metric, value) in zip(pairs, pairs, strict=True):
                shown = answer if isinstance(answer, str) else f"the {what} {answer:.4g}"
                found.append(f"always predicting {shown} has {metric} {value:.4g}")
        return "; ".join(found)


def check_data(task: Task, train: Dataset, validation: Dataset | None, tokens: Dataset | None) -> DataCheck:
    """Look at checked samples in linear time; ``tokens`` are the tokenized validation samples."""
    splits = {"train": train} | ({} if validation is None else {"validate": validation})
    columns = {name: rows[:] for name, rows in splits.items()}
    keys = {name: _keys(held) for name, held in columns.items()}
    first, differing = dict[int, Any](), set[int]()
    for name, held in columns.items():
        for key, label in zip(keys[name], held.get("labels", ()), strict=False):
            if first.setdefault(key, label) != label:
                differing.add(key)
    both = rare = constant = None
    if validation is not None and tokens is not None:
        trained, others = {*keys["train"]}, columns["train"].keys() - columns["validate"].keys() - {"labels"}
        if others:  # negatives or worse documents, which are pairs in the validation samples
            pairs = [
                {"text_1": columns["train"]["text_1"], name: columns["train"][name]} for name in others | {"text_2"}
            ]
            trained = {key for pair in pairs for key in _keys(pair)}
        both = sum(key in trained for key in keys["validate"])
        if isinstance(task, TaskWithClasses):
            counts = {
                name: Counter(k for label in held["labels"] for k in task.classes_in(label))
                for name, held in columns.items()
            }
            rare = {
                name: {split: rows[k] for split, rows in counts.items()}
                for k, name in enumerate(task.classes)
                if counts["validate"][k] < _RARE
            }
        if label_columns := {"labels", "token_labels"} & {*tokens.column_names}:
            constant = task.best_constant(tokens[label_columns.pop()][:])
    duplicates = {name: len(found) - len({*found}) for name, found in keys.items()}
    return DataCheck(duplicates, both, len(differing) if first else None, rare, constant)


def _keys(columns: Mapping[str, Sequence[Any]]) -> list[int]:
    """A number per row, equal for equal texts; lists of words are texts, too."""
    texts = [values for name, values in sorted(columns.items()) if name.startswith("text_")]
    if texts and isinstance(texts[0][0], list):
        texts = [list(map(tuple, values)) for values in texts]
    return [hash(row) for row in zip(*texts, strict=True)]


@dataclass
class DataSummary:
    """Filled while the data is built."""

    dropped: list[DroppedRows] = field(default_factory=list)
    truncation: Truncation | None = None  # None for samples that are streamed, packed or random tokens
    check: DataCheck | None = None  # None for samples that are streamed or random tokens, and without data.report

    def report(self) -> dict[str, Any]:
        """The section ``data`` of report.json."""
        truncation, check = (value and asdict(value) for value in (self.truncation, self.check))
        return {"dropped": [rows.report() for rows in self.dropped], "truncation": truncation, "check": check}

    def lines(self) -> dict[str, str]:
        """Name → text of the lines that a run prints before training."""
        dropped = {"dropped": "; ".join(map(str, self.dropped))} if self.dropped else {}
        return dropped | ({} if self.check is None else {"check": str(self.check)})


def invalid_rows(where: str, rows: int, problems: Sequence[Problem], fix: str) -> DataError:
    """An error that counts the invalid rows of ``rows``, describes the first ten, and names the fix."""
    shown = _listed([problem for problem, _ in problems])
    counted = f": {len(problems):,} of {rows:,} rows are invalid ({shown})" if len(problems) > 1 else f", {shown}"
    return DataError(where + counted, fix="; ".join([*dict.fromkeys(advice for _, advice in problems if advice), fix]))


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:_MOST_LISTED]) + (", …" if len(items) > _MOST_LISTED else "")
