"""The base class of tasks with classes: their names, and the class of a label as it is written in a data set."""

from __future__ import annotations

import math
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal, InvalidOperation
from typing import Any

from composer_speedups.core.errors import DataError
from composer_speedups.tasks.task import Task, shown

# Numbers as they are written in text. Leading zeros make a name, such as 007.
_INTEGER = re.compile(r"-?(0|[1-9]\d*)(\.0*)?")
_FRACTION = re.compile(r"-?\d*\.\d+(e[+-]?\d+)?|-?\d+e[+-]?\d+", re.IGNORECASE)
# what programs write for a missing value, and no name unless data.labels has it
_MISSING = ("nan", "NaN", "NaT", "<NA>", "#N/A", r"\N")
# a written list, or lines that an unbalanced quote has joined
_NO_NAME = re.compile(r"[\[({]\s*(['\"\d].*)?[\])}]|.*[\r\n].*", re.DOTALL)
LOOKS_MISSING = re.compile(r"nan|na|n/a|null|none", re.IGNORECASE)
_NUMBER_OR_MISSING = re.compile(rf"{_INTEGER.pattern}|{_FRACTION.pattern}|{LOOKS_MISSING.pattern}", re.IGNORECASE)


class TaskWithClasses(Task):
    """A task whose labels are classes: the names are ``labels``, or those of the training samples."""

    labels: list[str] | None = None

    @property
    def lacks_classes(self) -> bool:
        """Whether the names of the classes are still to be determined by :meth:`learn`."""
        return self.labels is None

    @property
    def classes(self) -> list[str]:
        return list(self.labels or ())

    def classes_in(self, label: Any) -> Iterable[int]:
        """The indices of the classes that a checked label holds, each once."""
        return [label]

    def learn(self, columns: Mapping[str, Sequence[Any]], declared: Mapping[str, list[str]], where: str) -> None:
        """Take the names that the dataset, described by ``where``, has ``declared`` for the integers of its column, or
        the sorted distinct labels in the raw ``columns`` of the training samples."""
        if self.labels is not None:
            return
        column = str(self.label_column)
        names = declared.get(column) or _distinct(_labels_in(columns[column]))
        if len(names) < 2:
            raise DataError(
                f"{where}: the column {column} has only the class {', '.join(names) or '(none)'}; there must be two or "
                "more, of text or integers (name them with data.labels; for numbers set model.task=regression)"
            )
        self.labels = names

    def class_of(self, value: Any, where: str, verb: str = "is") -> int:
        """The index of a label: of a name, or of an integer if the names are not integers."""
        names, plain, integer = self.classes, _plain(value), as_integer(value)
        for name in (_truth(value, names), plain, integer):
            if name is not None and str(name) in names:
                return names.index(str(name))
        if integer is not None and _are_text(names) and 0 <= integer < len(names):
            return integer
        numbers = "" if verb != "is" or _are_text(names) else "; for numbers set model.task=regression"
        fix = f"every label must be one of {', '.join(names[:20])} (data.labels){numbers}"
        raise DataError(f"{where}: {self.label_column} {verb} {shown(value)}", fix=fix)

    def check_classes(self, where: str) -> None:
        """Refuse learned classes (:meth:`learn`) that are artifacts of reading, look alike, or are the same number.
        ``data.labels`` accepts any names."""
        where = f"{where}: the column {self.label_column}"
        same: dict[Any, str] = {}
        for name in self.classes:
            if _NO_NAME.fullmatch(name):
                raise DataError(
                    f"{where} holds {shown(name)}, a written list or several lines; data.labels names real classes"
                )
            other = same.setdefault(_as_seen(name), name)
            if other != name:
                raise DataError(
                    f"{where} has the classes {other!a} and {name!a}, which are the same to a reader; write them in "
                    "one way, or name both in data.labels"
                )

    def check_labels(self, values: Sequence[Any], where: str) -> None:
        """Refuse integers beyond the last class, and warn if there is no 0: labels that count from 1 would be read as
        the next class."""
        names = self.classes
        if not _are_text(names):
            return
        labels = (_plain(label) for label in _labels_in(values) if not isinstance(label, bool))
        integers = {as_integer(label) for label in labels if str(label) not in names} - {None, -1}
        counted = f"for one of {len(names)} classes, whose integers count from 0 (the class {names[0]})"
        if too_large := [integer for integer in integers if integer is not None and integer >= len(names)]:
            raise DataError(
                f"{where}: {self.label_column} has {min(too_large)} {counted}; write the names of the classes"
            )
        if integers and 0 not in integers:
            warnings.warn(f"{where}: {self.label_column} has no 0 {counted}", stacklevel=2)

    def classes_of(self, value: Any, where: str, expected: str) -> list[int]:
        """The indices of a list of labels; ``expected`` describes it for errors."""
        if not isinstance(value, list | tuple):
            raise DataError(f"{where}: {self.label_column} is {shown(value)}", fix=f"every label must be {expected}")
        return [self.class_of(label, where, "holds") for label in value]

    def most_frequent(self, labels: Iterable[int]) -> dict[str, Any]:
        """The most frequent class, and the accuracy of always predicting it."""
        counts = Counter(labels)
        [(best, hits)] = counts.most_common(1)
        return {"label": self.classes[best], "accuracy": hits / counts.total()}

    def head_settings(self) -> dict[str, Any]:
        names = self.classes
        return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def as_integer(label: Any) -> int | None:
    """The integer that a label is or, in files of text, that it spells; None for other labels."""
    plain = _plain(label)
    if isinstance(plain, str):
        return int(plain.partition(".")[0]) if _INTEGER.fullmatch(plain) else None
    return plain


def _are_text(names: Sequence[str]) -> bool:
    return not any(name.lstrip("+-").isdigit() for name in names)


def _labels_in(values: Sequence[Any]) -> list[Any]:
    """The labels of a column, whose cells may be lists."""
    return [label for value in values for label in (value if isinstance(value, list | tuple) else [value])]


def _as_seen(name: str) -> Decimal | str:
    """Normalize a name: without quotes and invisible characters, accents composed, numbers and booleans as Decimal."""
    seen = "".join(c for c in unicodedata.normalize("NFC", name) if unicodedata.category(c) != "Cf")
    if len(seen) > 2 and seen[0] == seen[-1] and seen[0] in "'\"":
        seen = seen[1:-1]
    if seen.lower() in ("true", "false"):
        return Decimal(seen.lower() == "true")
    try:
        number = Decimal(seen)
    except InvalidOperation:
        return seen
    return number if number.is_finite() else seen


def _truth(value: Any, names: Sequence[str]) -> str | None:
    """The class that a boolean, or its text in any case, names: ``true`` for True among ``true`` and ``false``."""
    text = str(value).strip()
    if text.lower() not in ("true", "false"):
        return None
    return text if text in names else next((name for name in names if name.lower() == text.lower()), None)


def _plain(value: Any) -> int | str | None:
    """A label as an integer or text; None if it is neither."""
    if isinstance(value, bool):
        return int(value)
    # pandas stores an integer column with gaps as floats, and databases export integers as decimals
    if isinstance(value, (float, Decimal)):
        return int(value) if math.isfinite(value) and value == int(value) else None
    if isinstance(value, int):
        return value
    if isinstance(value, (date, time)):  # of a parquet file
        return str(value)
    return value.strip() if isinstance(value, str) and value.strip() else None


def _distinct(labels: Sequence[Any]) -> list[str]:
    """The distinct labels: integers in their order if all labels are numbers or missing, and otherwise names."""
    if {type(label) for label in labels} - {type(None)} == {bool}:  # as a CSV file has them
        return sorted({str(label) for label in labels if label is not None})
    names = {plain for label in labels if (plain := _plain(label)) is not None and plain not in _MISSING}
    integers = {integer for name in names if (integer := as_integer(name)) is not None}
    if names and all(isinstance(name, int) or _NUMBER_OR_MISSING.fullmatch(name) for name in names):
        return [str(integer) for integer in sorted(integers - {-1})]  # -1 is datasets' value for rows without a label
    return sorted({str(name) for name in names})
