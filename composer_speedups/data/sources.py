"""Load samples from the hub, from files or from the built-in generator, check each row, or generate random tokens."""

from __future__ import annotations

import codecs
import contextlib
import glob
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from datasets import ClassLabel, Dataset, DatasetDict, Features, load_dataset, load_from_disk

from composer_speedups.core.errors import DataError, first_line
from composer_speedups.core.files import with_working_directory
from composer_speedups.data.builtin import builtin_samples
from composer_speedups.data.config import GENERATED, DataConfig
from composer_speedups.data.conll import read_conll
from composer_speedups.tasks.task import Task

__all__ = [
    "check_columns",
    "class_names",
    "load_samples",
    "load_validation",
    "named",
    "random_rows",
    "read_file",
    "unreadable",
]

Arrays = npt.NDArray[Any]

_MOST_TOKENS = 2**31 - 1  # tokens of one Arrow list array, whose offsets are int32
_LARGEST_BLOCK = 2**31 - 1  # bytes that Arrow parses at a time
_MAX_NESTED = 50  # levels in a JSON file; Arrow's parser is recursive, and deep nesting overflows the stack
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))


def _read_csv(path: Path, **format: Any) -> pyarrow.Table:
    options = pyarrow.csv.ParseOptions(**format)

    def read(block: int | None) -> pyarrow.Table:
        return pyarrow.csv.read_csv(path, pyarrow.csv.ReadOptions(block_size=block), options)

    return _of_any_length(read, path)


def _of_any_length(read: Callable[[int | None], pyarrow.Table], path: Path) -> pyarrow.Table:
    """Read blocks of Arrow's size, in parallel; or the whole file as one block if a row is longer than that (1 MiB)."""
    try:
        return read(None)
    except pyarrow.ArrowInvalid as error:
        if "straddl" not in str(error):
            raise
    return read(min(path.stat().st_size + 1, _LARGEST_BLOCK))


def _read_jsonl(path: Path) -> pyarrow.Table:
    """Read JSON lines, after a check of their nesting that does not recurse.

    Raises:
        ValueError: A value is nested too deeply.
    """
    depth = 0  # goes on from line to line, since Arrow reads values that contain newlines
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if b"\\" in line:
                line = re.sub(rb"\\.", b"", line)  # escaped quotes
            outside = b"".join(line.translate(None, _NO_BRACKETS).split(b'"')[::2])  # of strings
            opened = outside.count(b"[") + outside.count(b"{")
            if depth + opened <= _MAX_NESTED:
                depth = max(0, depth + 2 * opened - len(outside))
                continue
            for bracket in outside:
                depth = depth + 1 if bracket in b"[{" else max(0, depth - 1)
                if depth > _MAX_NESTED:
                    raise ValueError(f"line {number} is nested deeper than {_MAX_NESTED} levels; remove that value")
    return _of_any_length(lambda block: pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=block)), path)


_READERS: dict[str, Callable[[Path], pyarrow.Table]] = {
    ".parquet": pyarrow.parquet.read_table,
    ".csv": lambda path: _read_csv(path, newlines_in_values=True),
    # as in GLUE's and most other files: quotes are literal characters
    ".tsv": lambda path: _read_csv(path, delimiter="\t", quote_char=False),
    ".jsonl": _read_jsonl,
    ".conll": read_conll,
    ".txt": lambda path: pyarrow.table({"text": path.read_text(encoding="utf-8-sig").splitlines()}),
}
_CHANGED_TYPE = re.compile(r"Column\(/(\S+)\) changed from (\w+) to (\w+)")  # an error of Arrow about JSON
_TEXT = (".csv", ".tsv", ".jsonl", ".conll", ".txt")


def load_samples(config: DataConfig, task: Task) -> tuple[Dataset, Dataset | None]:
    """Load training and validation samples as returned by :meth:`.Task.example`; the task learns its labels from the
    former.

    Raises:
        DataError: Names the file or dataset, the row, and what is wrong with it.
    """
    table, where = _training_table(config, task)
    held, held_where = _validation_table(config, task)
    kept = drawn = None
    if config.eval_fraction is not None:
        count = min(max(round(config.eval_fraction * table.num_rows), 1), table.num_rows - 1)
        if count < 1:
            raise DataError(f"{where} has only one row, which data.eval_fraction cannot split")
        columns = _columns(table, task, where, training=True)
        # from all rows, because a class may occur only in the held-out rows
        task.learn(columns, _declared(table, where), where)
        if task.groups_samples:
            drawn = _whole_groups(columns[task.texts[0]], count, config.seed)
        else:
            drawn = np.sort(np.random.default_rng(config.seed).permutation(table.num_rows)[:count])
        kept = np.setdiff1d(np.arange(table.num_rows), drawn)
        if not len(kept):
            raise DataError(f"{where} has rows of only one {task.texts[0]}, which data.eval_fraction cannot split")
        held, held_where = table, where
    train = _checked(table, task, where, training=True, places=kept)
    validation = None if held is None else _checked(held, task, held_where, training=False, places=drawn)
    return (
        _sample(train, config, config.train_samples),
        None if validation is None else _sample(validation, config, config.eval_samples, whole=task.groups_samples),
    )


def load_validation(config: DataConfig, task: Task) -> Dataset | None:
    """Load the validation samples of the hub or of a file into memory; None if there are none.

    The task learns its labels from them, because streamed training samples cannot be scanned in advance.
    """
    table, where = _validation_table(config, task)
    if table is None:
        return None
    task.learn(_columns(table, task, where, training=False), _declared(table, where), where)
    checked = _checked(table, task, where, training=False)
    return _sample(checked, config, config.eval_samples, whole=task.groups_samples)


def _training_table(config: DataConfig, task: Task) -> tuple[pyarrow.Table, str]:
    if config.source == "builtin":
        return _builtin(config, task, "train", config.train_samples)
    if config.source == "hub":
        return _from_hub(config, config.train_split)
    assert config.train_file is not None  # ensured by the schema's checks
    return _from_files(config.train_file, "train_file")


def _validation_table(config: DataConfig, task: Task) -> tuple[pyarrow.Table | None, str]:
    if config.source == "builtin":
        return _builtin(config, task, "eval", config.eval_samples)
    if config.eval_fraction is None and config.source == "hub" and config.eval_split is not None:
        return _from_hub(config, config.eval_split)
    if config.source != "hub" and config.eval_file is not None:
        return _from_files(config.eval_file, "eval_file")
    return None, ""


def random_rows(count: int, seed: int, split: str, length: int, tokenizer: Any, classes: int = 2) -> Dataset:
    """Generate rows of random token ids, all of one length, to measure memory and speed. The same arguments give the
    same rows.

    Args:
        count: Number of rows.
        seed: Seed of the generator.
        split: ``"train"`` or ``"eval"``, which have different rows.
        length: Tokens per row, without padding.
        tokenizer: Tokens are drawn uniformly from its vocabulary without special tokens.
        classes: Number of labels.

    Returns:
        Columns ``input_ids`` (lists of int) and ``labels`` (random classes), as from :func:`.tokens.tokenize`.
    """
    generator = np.random.default_rng([seed, zlib.crc32(split.encode())])
    plain = np.setdiff1d(np.arange(len(tokenizer), dtype=np.int32), tokenizer.all_special_ids)
    ids = generator.choice(plain, size=count * length)
    most = max(1, _MOST_TOKENS // length) * length  # tokens per chunk
    chunks = [ids[start : start + most].astype(np.int32) for start in range(0, len(ids), most)]
    starts = [np.arange(0, len(chunk) + 1, length, dtype=np.int32) for chunk in chunks]
    rows = pyarrow.chunked_array(map(pyarrow.ListArray.from_arrays, starts, chunks))
    return Dataset(pyarrow.table({"input_ids": rows, "labels": generator.integers(0, classes, count)}))


def _builtin(config: DataConfig, task: Task, split: str, samples: int | None) -> tuple[pyarrow.Table, str]:
    columns = builtin_samples(task.name, samples or GENERATED, config.seed, split, config.length_scale)
    return pyarrow.table(columns), "data.source: builtin"


def _from_hub(config: DataConfig, split: str) -> tuple[pyarrow.Table, str]:
    where = f"data.hub_name {config.hub_name!r}, split {split!r}"
    try:
        dataset = load_dataset(config.hub_name, config.hub_config, split=split, revision=config.hub_revision)
    except Exception as error:  # network, authentication, missing split: different exception classes
        raise DataError(
            f"{where}: cannot be loaded ({type(error).__name__}: {first_line(error)}); "
            "use data.source=files with a local file, or data.source=builtin"
        ) from error
    return dataset.data.table, where


def _from_files(name: str, key: str) -> tuple[pyarrow.Table, str]:
    """The rows of a file, of all files that match a pattern, or of a folder written by ``datasets``."""
    path, where = Path(os.path.expanduser(name)), f"data.{key}: {name}"
    if os.path.isdir(path):
        return _saved_dataset(path, where), where
    paths = [path]
    if not os.path.isfile(path) and glob.has_magic(str(path)):  # pathlib raises for names that are too long
        paths = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))]
        if not paths:
            raise DataError(f"data.{key}: there is no file {with_working_directory(name)}")
    tables = [read_file(each, f"data.{key}") for each in paths]
    try:
        return pyarrow.concat_tables(tables, promote_options="permissive"), where
    except pyarrow.ArrowException as error:
        raise DataError(f"{where}: the files have different columns ({first_line(error)})") from error


def _saved_dataset(path: Path, where: str) -> pyarrow.Table:
    try:
        saved = load_from_disk(str(path))
    except Exception as error:  # FileNotFoundError, and errors of pyarrow and JSON
        raise DataError(
            f"{where} is not a folder that datasets.save_to_disk wrote ({first_line(error)}); for files in it use a "
            f"pattern, such as {path}/*.parquet"
        ) from error
    if isinstance(saved, DatasetDict):
        raise DataError(
            f"{where} contains the splits {', '.join(saved)}; name the folder of one, such as "
            f"{path}/{next(iter(saved))}"
        )
    return saved.data.table  # save_to_disk does not write indices


def read_file(path: Path, key: str) -> pyarrow.Table:
    """Read the rows of one file.

    Args:
        path: The file; its suffix determines the format.
        key: The config key that names it, for errors.

    Raises:
        DataError: It cannot be read.
    """
    name = str(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{key}: {name} must end in {', '.join(_READERS)}")
    if not os.path.isfile(path):  # pathlib raises for names that are too long
        raise DataError(f"{key}: {with_working_directory(name)} is not a file; name an existing one")
    if path.stat().st_size == 0:
        raise DataError(f"{key}: {name} is empty; use a file with samples")
    before = _version(path)
    try:
        table = reader(path)
        if path.suffix.lower() in _TEXT:
            table.schema.names  # noqa: B018 - a header that is not UTF-8 raises here
            table.validate(full=True)  # bytes that are not UTF-8 are read without an error, but are not text
        after = _version(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise unreadable(f"{key}: {name}", [path], error) from error
    if before != after:
        raise DataError(f"{key}: {name} changed while it was being read; start again when it is complete")
    if path.suffix.lower() in _TEXT and any(pyarrow.types.is_binary(kind) for kind in table.schema.types):
        raise unreadable(f"{key}: {name}", [path], ValueError("it contains bytes that are not text"))
    return table


def unreadable(where: str, paths: Sequence[Path], error: Exception) -> DataError:
    """The error for files that cannot be read, perhaps because one is not UTF-8; ``where`` names the key and the
    files."""
    problem = next((problem for path in paths if (problem := not_utf8(path))), None)
    if problem is not None:
        return DataError(f"{where.partition(': ')[0]}: {problem}")
    if changed := _CHANGED_TYPE.search(str(error)):
        column, first, other = changed.groups()
        return DataError(f"{where}: the column {column!r} has both {first} and {other} values; use one type")
    return DataError(f"{where} cannot be read ({first_line(error)})")


def not_utf8(path: Path) -> str | None:
    """Describe the first byte that is not UTF-8, with the fix; None for UTF-8 and for binary formats."""
    if path.suffix.lower() not in _TEXT:
        return None
    before = 0
    with contextlib.suppress(OSError), open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                is_utf16 = number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                return (
                    f"{path} is not UTF-8: byte {line[error.start]:#04x} in line {number} (byte "
                    f"{before + error.start + 1} of the file); save it as UTF-8, for example with: "
                    f"iconv -f {'utf-16' if is_utf16 else 'latin1'} -t utf-8 {path} > new{path.suffix}"
                )
            before += len(line)
    return None


def _checked(table: pyarrow.Table, task: Task, where: str, *, training: bool, places: Any = None) -> Dataset:
    """Refuse rows that cannot be trained on, and keep the columns that the task reads.

    ``places`` are the indices of the rows to keep; None for all.
    """
    numbers = range(1, table.num_rows + 1) if places is None else (places + 1).tolist()
    table = table if places is None else table.take(places)
    columns = _columns(table, task, where, training=training)
    if training:
        task.learn(columns, _declared(table, where), where)
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    examples, invalid, first = [], [], None
    for number, row in zip(numbers, rows, strict=True):
        try:
            examples.append(
                task.example(dict(zip(names, row, strict=True)), f"{where}, row {number}", training=training)
            )
        except DataError as error:
            invalid.append(number)
            first = first or error
    if first is not None:
        raise DataError(f"{first}{_listed(invalid)}") from first
    return Dataset.from_list(task.prepared(examples, training=training))


def _listed(rows: Sequence[int]) -> str:
    """How many rows are invalid and the first of them, for an error message that describes one."""
    if len(rows) == 1:
        return ""
    return f"; {len(rows):,} rows are invalid: {', '.join(map(str, rows[:5]))}{', …' if len(rows) > 5 else ''}"


def _columns(table: pyarrow.Table, task: Task, where: str, *, training: bool) -> dict[str, list[Any]]:
    """The columns that the task reads, with names of classes instead of their integers."""
    needed = task.columns(training=training)
    check_columns(table, needed, where)
    if table.num_rows == 0:
        raise DataError(f"{where} has no rows; use a file with samples")
    declared = _declared(table, where)
    try:
        columns = {column: table.column(column).to_pylist() for column, _ in needed}
    # duplicate names, invalid UTF-8 and others
    except (pyarrow.ArrowException, KeyError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: its columns cannot be read ({first_line(error)})") from error
    return {
        column: [named(value, declared[column]) for value in values] if column in declared else values
        for column, values in columns.items()
    }


def check_columns(table: pyarrow.Table, needed: Sequence[tuple[str, str]], where: str) -> None:
    """Refuse a table that lacks a column.

    Args:
        table: The table.
        needed: Columns, each with the config key that names it.
        where: The dataset, for the error.

    Raises:
        DataError: Names the missing column, the existing ones, and the key.
    """
    for column, key in needed:
        if column not in table.column_names:
            has = ", ".join(table.column_names) or "none"
            raise DataError(f"{where} has no column {column!r} (it has: {has}); set {key}")


def _declared(table: pyarrow.Table, where: str) -> dict[str, list[str]]:
    try:
        return class_names(Features.from_arrow_schema(table.schema))
    except Exception as error:  # of various classes, for JSON from the file
        raise DataError(
            f"{where}: the metadata 'huggingface', which declares its columns for datasets, is invalid "
            f"({first_line(error)}); remove it with pyarrow's replace_schema_metadata()"
        ) from error


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Column → the class names that ``datasets`` stores for its integers, in a file or on the hub."""
    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: list(feature.names) for name, feature in inner.items() if isinstance(feature, ClassLabel)}


def named(value: Any, names: list[str]) -> Any:
    """The name of a class for its integer, or of each in a list; None otherwise, such as for GLUE's -1 in test sets."""
    if isinstance(value, list):
        return [named(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


def _version(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _sample(dataset: Dataset, config: DataConfig, samples: int | None, *, whole: bool = False) -> Dataset:
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
