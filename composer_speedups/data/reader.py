"""Read rows of files, saved datasets and the hub. Memory, streams and ``predict`` share one reader per format.

``datasets`` takes seconds to import, so only the functions that need it do: columns of files are checked before that.

A cell of a .csv or .tsv file is text exactly as written: ``NA``, ``007`` and ``1.0`` are not converted.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow
import pyarrow.parquet

from composer_speedups.core.errors import DataError, did_you_mean, first_line
from composer_speedups.data.conll import conll_rows
from composer_speedups.data.paths import TEXT_FORMATS, find_files, is_address, suffix_of
from composer_speedups.tasks.settings import DataConfig, TaskSettings

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
ClassNames = Mapping[str, list[str]]
"""Column → the class names that a data set declares for its integers."""
Needed = tuple[str, str]
"""A column that is read, and the config key that names it."""

_MAX_CELL = 2**31 - 1  # characters of a cell; Python's default of 131,072 is less than some documents have
_PACKED = (b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zX", b"BZh")  # first bytes: zip, gzip, zstd, xz, bz2
_BATCH = 1024  # rows of a parquet file that are converted to Python values at a time


def _csv_rows(file: Iterator[str]) -> Iterator[Row]:
    """Cells are separated by the first of ``,``, ``;``, tab and ``|`` that the header line has."""
    header = next(file, "")
    mark = next((mark for mark in ",;\t|" if mark in header), ",")
    return _separated(itertools.chain([header], file), delimiter=mark)


def _separated(file: Iterable[str], **dialect: Any) -> Iterator[Row]:
    csv.field_size_limit(_MAX_CELL)
    lines = csv.reader(file, strict=True, **dialect)
    names = next(_numbered(lines), [])
    _check_distinct(names)
    for cells in _numbered(lines):
        if cells and len(cells) != len(names):
            quoted = len(cells) > len(names) and lines.dialect.quoting != csv.QUOTE_NONE
            fix = f"; put texts with {lines.dialect.delimiter!r} in double quotes" if quoted else ""
            raise ValueError(f"line {lines.line_num} has {len(cells)} cells, and the header has {len(names)}{fix}")
        if cells:  # no empty line
            yield dict(zip(names, cells, strict=True))


def _numbered(lines: Any) -> Iterator[list[str]]:
    """The lines of a csv.reader, whose errors then have a line number."""
    try:
        yield from lines
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num}: {error}") from error


def _json_rows(file: Any) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_json_object)
            if "\\ud" in line.lower():  # half of a surrogate pair is not a character, and no tokenizer accepts it
                json.dumps(row, ensure_ascii=False).encode()
        except RecursionError as error:
            raise ValueError(f"line {number} is nested too deeply; remove that value") from error
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object")
        yield row


def _json_object(pairs: list[tuple[str, Any]]) -> Row:
    """Refuse a repeated key, of which Python would keep the last value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        _check_distinct([name for name, _ in pairs])
    return row


def _parquet_rows(file: Any, columns: Iterable[str], declared: ClassNames | None) -> Iterator[Row]:
    """Rows with at least ``columns``: all columns if one of these does not exist, or if none is named."""
    with pyarrow.parquet.ParquetFile(file) as parquet:
        names = parquet.schema_arrow.names
        _check_distinct(names)
        own = {} if declared is None else _classes_in(parquet.schema_arrow)
        _check_declared(own, declared)
        wanted = [*columns]
        for batch in parquet.iter_batches(_BATCH, columns=wanted if wanted and {*wanted} <= {*names} else None):
            yield from (with_class_names(row, own) for row in batch.to_pylist())


def _check_declared(own: ClassNames, declared: ClassNames | None) -> None:
    """Refuse class names that only one of two files declares: the integers of both would be mixed up."""
    if declared is not None and (mismatched := own.keys() ^ declared.keys()):
        name = min(mismatched)
        one, other = ("this file", "the first one") if name in own else ("the first file", "this one")
        raise ValueError(f"{one} declares class names for {name!r}, and {other} does not; write both in the same way")


def _check_distinct(names: Sequence[str]) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"it has two columns {twice!r}")


_TEXT_READERS: dict[str, Callable[[Any], Iterator[Row]]] = {
    ".csv": _csv_rows,
    ".tsv": partial(_separated, delimiter="\t", quoting=csv.QUOTE_NONE),  # as GLUE's: quotes are literal characters
    ".jsonl": _json_rows,
    ".conll": conll_rows,
    ".txt": lambda file: ({"text": line.rstrip("\r\n")} for line in file),
}
assert tuple(_TEXT_READERS) == TEXT_FORMATS


def iterate_rows(
    paths: Iterable[str], key: str, columns: Iterable[str] = (), declared: ClassNames | None = None
) -> Iterator[Row]:
    """Iterate over the rows of files, of which the caller reads ``columns`` only.

    With ``declared``, the :func:`declared_classes` of the data set's first file, integers of classes become the names
    that their own file declares for them.
    """
    for path in paths:
        reader = _TEXT_READERS.get(suffix_of(path))
        with _readable(path, key):
            if reader is None:
                with _open(path, "rb") as file:
                    yield from _parquet_rows(file, columns, declared)
            else:  # csv reads line ends in quotes itself
                _check_declared({}, declared)
                with _open(path, "r", encoding="utf-8-sig", newline="") as file:
                    yield from reader(file)


def _open(path: str, mode: str, **settings: Any) -> Any:
    try:
        return (fsspec.open if is_address(path) else open)(path, mode, **settings)
    except TypeError as error:  # fsspec's classes for some kinds of addresses need further arguments
        raise ValueError(first_line(error)) from error


@contextlib.contextmanager
def _readable(path: str, key: str) -> Iterator[None]:
    """Turn errors of reading a file into one that names it."""
    try:
        yield
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, csv.Error, ImportError) as error:  # fsspec lacks a package
        is_text = isinstance(error, UnicodeDecodeError) and suffix_of(path) in _TEXT_READERS
        problem = _not_utf8(path) if is_text else f"cannot be read ({first_line(error)})"
        raise DataError(f"{key}: {path} {problem}") from error


def load_rows(
    paths: Sequence[str], key: str, columns: Sequence[Needed] | None, declared: ClassNames | None = None
) -> list[Row]:
    """:func:`iterate_rows` as a list of rows with ``columns``, each with its config key; None reads all columns."""
    rows: list[Row] = []
    wanted = [column for column, _ in columns or ()]
    for path in paths:
        before, names = _version(path), dict[str, None]()
        for row in iterate_rows([path], key, wanted, declared):
            names.update(dict.fromkeys(row))
            rows.append(row if columns is None else {column: row.get(column) for column in wanted})
        if _version(path) != before:
            raise DataError(f"{key}: {path} changed while it was being read; start again when it is complete")
        if names:  # there are rows
            check_columns(names, columns or (), f"{key}: {path}")
    return rows


def no_rows(where: str) -> DataError:
    """The error for a data set, described by ``where``, without rows."""
    header = " after its header line" if where.endswith((".csv", ".tsv")) else ""
    return DataError(f"{where} has no rows{header}; use a file with samples")


def check_data_files(data: DataConfig, task: TaskSettings) -> None:
    """Refuse a missing local file, and those without a column that the task reads, before the slow imports."""
    mistakes = dict[Needed, str]()  # of each column, in the first file that lacks it
    for split, name in (("train", data.train_file), ("eval", data.eval_file)):
        key, training = f"data.{split}_file", split == "train"
        if name is None or is_address(name) or (data.source == "mds" and training):
            continue
        folder = os.path.isdir(os.path.expanduser(name))
        paths = [name] if folder else find_files(name, key)
        columns, streamed = task.columns(training=training), data.streaming and training
        for path in paths:
            wanted = () if streamed else [column for column, _ in columns]
            names = saved_dataset(name, key).column_names if folder else _names_of_columns(path, key, wanted)
            tokens = streamed and "input_ids" in names  # which are read in place of texts
            needed = [(column, setting) for column, setting in columns if not (tokens and "text" in setting)]
            if names:  # there are rows
                for column, mistake in missing_columns(names, needed, f"{key}: {path}").items():
                    mistakes.setdefault(column, mistake)
    if mistakes:
        raise DataError.of(mistakes.values())


def _names_of_columns(path: str, key: str, wanted: Sequence[str]) -> list[str]:
    """The columns of a local file, from its schema or first row; of .jsonl, from rows until ``wanted`` is complete."""
    names = dict[str, None]()
    if suffix_of(path) not in _TEXT_READERS:
        with _readable(path, key), pyarrow.parquet.ParquetFile(path) as parquet:
            return list(parquet.schema_arrow.names if parquet.metadata.num_rows else ())
    for row in iterate_rows([path], key):
        names.update(dict.fromkeys(row))
        if suffix_of(path) != ".jsonl" or names.keys() >= {*wanted}:
            break
    return list(names)


def _version(path: str) -> tuple[int, ...] | None:
    """A value that changes when a local file is written or removed; None for an address."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_columns(names: Iterable[str], needed: Sequence[Needed], where: str) -> None:
    """Refuse a data set, described by ``where``, whose columns ``names`` lack some of ``needed``: a line for each."""
    if mistakes := missing_columns(names, needed, where):
        raise DataError.of(mistakes.values())


def missing_columns(names: Iterable[str], needed: Sequence[Needed], where: str) -> dict[Needed, str]:
    """Those of ``needed`` that are not among the columns ``names`` of a data set, each with a line about it."""
    existing, mistakes = list(names), dict[Needed, str]()
    for column, key in needed:
        if column not in existing:
            hint = did_you_mean(column, existing, otherwise="")
            known = ", ".join(existing) or "none"
            fix = f"set {key}={'[NAME]' if key.endswith('columns') else 'NAME'}"
            mistakes[column, key] = f"{where} has no column {column!r}{hint} (it has: {known}); {fix}"
    return mistakes


def columns_in(rows: Iterable[Row]) -> list[str]:
    """The columns that any of the rows has, in the order in which they occur."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _not_utf8(path: str) -> str:
    """Describe the first byte that is not UTF-8, with the fix."""
    before = 0
    with _open(path, "rb") as lines:
        head = lines.read(4)
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                if head.startswith(_PACKED):
                    return f"is compressed or a spreadsheet; save its rows as a {Path(path).suffix} file in UTF-8"
                is_utf16 = number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                return (
                    f"is not UTF-8: byte {line[error.start]:#04x} in line {number} (byte "
                    f"{before + error.start + 1} of the file); save it as UTF-8, for example with: "
                    f"iconv -f {'utf-16' if is_utf16 else 'latin1'} -t utf-8 {path} > new{Path(path).suffix}"
                )
            before += len(line)
    return "changed while it was being read"


def declared_classes(path: str, key: str) -> ClassNames:
    """The class names that ``datasets`` stored in a parquet file; empty for other formats."""
    if suffix_of(path) in _TEXT_READERS:
        return {}
    with _readable(path, key), _open(path, "rb") as file:
        return _classes_in(pyarrow.parquet.read_schema(file))


def _classes_in(schema: pyarrow.Schema) -> ClassNames:
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    from datasets import Features

    try:
        return class_names(Features.from_arrow_schema(schema))
    except Exception as error:  # of various classes, for JSON from the file
        raise ValueError(
            "the metadata 'huggingface', which declares its columns for datasets, is invalid: "
            f"{first_line(error)}; remove it with pyarrow's replace_schema_metadata()"
        ) from error


def class_names(features: Mapping[str, Any]) -> ClassNames:
    """The class names that ``datasets`` stores, in a file or on the hub."""
    from datasets import ClassLabel

    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: list(feature.names) for name, feature in inner.items() if isinstance(feature, ClassLabel)}


def with_class_names(row: Row, declared: ClassNames) -> Row:
    """The row with names of classes for their integers; None for others, such as GLUE's -1 in test sets."""

    def named(value: Any, names: list[str]) -> Any:
        if isinstance(value, list):
            return [named(item, names) for item in value]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None

    return row | {column: named(row[column], names) for column, names in declared.items() if column in row}


def hub_dataset(config: DataConfig, split: str, *, streaming: bool = False) -> tuple[Any, str]:
    """A split of the hub's dataset, and its description for errors."""
    from datasets import load_dataset

    where = f"data.hub_name {config.hub_name!r}, split {split!r}"
    names = config.hub_name, config.hub_config
    try:
        return load_dataset(*names, split=split, revision=config.hub_revision, streaming=streaming), where
    except Exception as error:  # network, authentication, missing split: different exception classes
        raise DataError(
            f"{where}: cannot be loaded ({type(error).__name__}: {first_line(error)}); "
            "use data.source=files with a local file, or data.source=builtin"
        ) from error


def saved_dataset(name: str, key: str) -> Dataset:
    """A folder that ``datasets.save_to_disk`` wrote."""
    from datasets import DatasetDict, load_from_disk

    path = os.path.expanduser(name)
    try:
        saved = load_from_disk(path)
    except Exception as error:  # FileNotFoundError, and errors of pyarrow and JSON
        raise DataError(
            f"{key}: {name} is not a folder that datasets.save_to_disk wrote ({first_line(error)}); for files in it "
            f"use a pattern, such as {path}/*.parquet"
        ) from error
    if isinstance(saved, DatasetDict):
        raise DataError(
            f"{key}: {name} contains the splits {', '.join(saved)}; name the folder of one, such as "
            f"{path}/{next(iter(saved))}"
        )
    return saved.with_format(None)  # plain values, whatever framework it was saved for
