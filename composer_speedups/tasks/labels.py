"""The base class of tasks with classes: their names, and the class of a label as it is written in a data set."""

from __future__ import annotations

import math
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
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
_NUMBER_OR_MISSING = re.compile(rf"{_INTEGER.pattern}|{_FRACTION.pattern}|nan|na|n/a|null|none", re.IGNORECASE)


class TaskWithClasses(Task):
    """A task whose labels are classes: the names are ``labels``, or those of the training samples."""

    labels: list[str] | None = None

    @property
    def lacks_classes(self) -> bool:
        return self.labels is None

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return list(self.labels or ())

    def learn(self, columns: Mapping[str, Sequence[Any]], declared: Mapping[str, list[str]], where: str) -> None:
        """Take the names that the dataset declares, or the sorted distinct labels.

        Raises:
            DataError: Labels that are not classes, or a single class.
        """
        if self.labels is not None:
            return
        column = str(self.label_column)
        labels = [label for value in columns[column] for label in (value if _is_list(value) else [value])]
        names = declared.get(column) or _distinct(labels)
        if len(names) < 2:
            unusable = [label for label in labels if _is_unusable(label)]
            if unusable:
                raise DataError(
                    f"{where}: the column {column} holds {shown(unusable[0])}; a class is text or an integer (for "
                    "numbers set model.task=regression)"
                )
            raise DataError(
                f"{where}: the column {column} has only the class {', '.join(names) or '(no rows)'}; there must be two "
                "or more (name them all with data.labels)"
            )
        self.labels = names

    def class_of(self, value: Any, where: str, *, among: bool = False) -> int:
        """The index of a label: of a name, or of an integer if the names are not integers.

        ``among`` says that it is one of several labels of its row.

        Raises:
            DataError: It is not one of the classes.
        """
        names, plain = self.classes, _plain(value)
        integer = _integer(plain)
        for name in (_truth(value, names), plain, integer):
            if name is not None and str(name) in names:
                return names.index(str(name))
        names_are_text = not any(name.lstrip("+-").isdigit() for name in names)
        if integer is not None and names_are_text and 0 <= integer < len(names):
            return integer
        if integer is None and _FRACTION.fullmatch(str(value)):
            raise DataError(
                f"{where}: {self.label_column} is {shown(value)}, which is not a class; for numbers set "
                "model.task=regression"
            )
        if plain in _MISSING:
            raise DataError(
                f"{where}: {self.label_column} {'holds' if among else 'is'} {shown(value)}, a missing value; every "
                "sample needs a label (if it is a class, add it to data.labels)"
            )
        if isinstance(value, list) and not among:
            raise DataError(
                f"{where}: {self.label_column} is a list, {shown(value)}; set model.task=multilabel, or "
                "model.task=token_classification if it has a label for each word"
            )
        raise DataError(
            f"{where}: {self.label_column} {'holds' if among else 'is'} {shown(value)}; every label must be one of "
            f"{', '.join(names[:20])} (data.labels)"
        )

    def check_classes(self, where: str) -> None:
        names, where = self.classes, f"{where}: the column {self.label_column}"
        if odd := next((name for name in names if _NO_NAME.fullmatch(name)), None):
            raise DataError(
                f"{where} holds {shown(odd)}, a written list or several lines; data.labels names real classes"
            )
        same: dict[Any, str] = {}
        for name in names:
            other = same.setdefault(_as_seen(name), name)
            if other != name:
                raise DataError(
                    f"{where} has the classes {other!a} and {name!a}, which are the same to a reader; write them in "
                    "one way, or name both in data.labels"
                )
        cases: dict[str, str] = {}
        if twins := [name for name in names if cases.setdefault(name.casefold(), name) != name]:
            also = cases[twins[0].casefold()]
            warnings.warn(f"{where} has the classes {also} and {twins[0]}, which differ only in case", stacklevel=3)
        integers = [name for name in names if _INTEGER.fullmatch(name)]
        if integers and len(integers) < len(names):
            word = next(name for name in names if name not in integers)
            warnings.warn(f"{where} has integers and names as classes, such as {integers[0]} and {word}", stacklevel=3)

    def check_labels(self, values: Sequence[Any], where: str) -> None:
        """Refuse integers that count the classes from 1, of which all but the last would be taken for the next class.

        A warning says if no integer tells where they begin.
        """
        names = self.classes
        if any(name.lstrip("+-").isdigit() for name in names):
            return
        labels = (label for value in values for label in (value if _is_list(value) else [value]))
        plain = (_plain(label) for label in labels if not isinstance(label, bool))
        integers = {_integer(label) for label in plain if str(label) not in names} - {None, -1}
        counted = f"for one of {len(names)} classes, whose integers count from 0 (the class {names[0]})"
        if too_large := [integer for integer in integers if integer is not None and integer >= len(names)]:
            raise DataError(
                f"{where}: {self.label_column} has {min(too_large)} {counted}; write the names of the classes"
            )
        if integers and 0 not in integers:
            warnings.warn(f"{where}: {self.label_column} has no 0 {counted}", stacklevel=2)

    def classes_of(self, value: Any, where: str, expected: str) -> list[int]:
        """The indices of a list of labels; ``expected`` describes it for errors."""
        if not _is_list(value):
            raise DataError(f"{where}: {self.label_column} is {shown(value)}; every label must be {expected}")
        return [self.class_of(label, where, among=True) for label in value]

    def head_settings(self) -> dict[str, Any]:
        names = self.classes
        return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def as_integer(label: Any) -> int | None:
    """The integer that a label is or is written as; None for others."""
    return _integer(_plain(label))


def _is_unusable(label: Any) -> bool:
    """Whether a label is neither a name nor an integer, but not missing either."""
    if isinstance(label, str):
        return _FRACTION.fullmatch(label.strip()) is not None
    return label is not None and _plain(label) is None


def _as_seen(name: str) -> Decimal | str:
    """A name without quotes and invisible characters, with composed accents; the number that it stands for."""
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


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


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


def _integer(plain: int | str | None) -> int | None:
    """The integer that a label is, or that its text is written as; files of text have no other integers."""
    if isinstance(plain, str):
        return int(plain.partition(".")[0]) if _INTEGER.fullmatch(plain) else None
    return plain


def _distinct(labels: Sequence[Any]) -> list[str]:
    """The distinct labels: integers in their order if all labels are numbers or missing, and otherwise names. Booleans
    are ``False`` and ``True``, as in a CSV file."""
    if {type(label) for label in labels} - {type(None)} == {bool}:
        return sorted({str(label) for label in labels if label is not None})
    names = {plain for label in labels if (plain := _plain(label)) is not None and plain not in _MISSING}
    integers = {integer for name in names if (integer := _integer(name)) is not None}
    if names and all(isinstance(name, int) or _NUMBER_OR_MISSING.fullmatch(name) for name in names):
        return [str(integer) for integer in sorted(integers - {-1})]  # -1 is datasets' value for rows without a label
    return sorted({str(name) for name in names})
