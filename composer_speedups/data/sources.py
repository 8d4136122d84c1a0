"""Reviews from the hub, from local files, or built in, checked row by row; and rows of random tokens."""

from __future__ import annotations

import codecs
import contextlib
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from datasets import Dataset, load_dataset

from composer_speedups.core.errors import DataError, first_line
from composer_speedups.core.files import with_working_directory
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.config import DataConfig

__all__ = ["load_reviews", "load_validation", "random_rows", "unreadable"]

_READERS: dict[str, Callable[[Path], pyarrow.Table]] = {
    ".parquet": pyarrow.parquet.read_table,
    ".csv": lambda path: pyarrow.csv.read_csv(path, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True)),
    ".jsonl": pyarrow.json.read_json,
}
_TEXT = (".csv", ".jsonl")


def load_reviews(config: DataConfig) -> tuple[Dataset, Dataset | None]:
    """Training and validation reviews with the columns ``text`` (str) and ``label`` (0 or 1).

    Raises:
        DataError: One line naming the file or dataset, the row, and what is wrong with it.
    """
    if config.source == "builtin":
        return _builtin(config, "train", config.train_samples), _builtin(config, "eval", config.eval_samples)
    if config.source == "hub":
        train = _from_hub(config, config.train_split)
    else:
        assert config.train_file is not None  # the schema's checks saw to it
        train = _from_file(config, "train_file", config.train_file)
    return _sample(train, config, config.train_samples), load_validation(config)


def load_validation(config: DataConfig) -> Dataset | None:
    """The validation reviews of the hub or of a file, held in memory; None without any."""
    if config.source == "hub":
        return _sample(_from_hub(config, config.eval_split), config, config.eval_samples)
    if config.eval_file is None:
        return None
    return _sample(_from_file(config, "eval_file", config.eval_file), config, config.eval_samples)


def random_rows(count: int, seed: int, split: str, length: int, tokenizer: Any) -> Dataset:
    """Rows of random token ids, all of one length, to measure memory and speed; the same ones for the same arguments.

    Args:
        count: Number of rows.
        seed: Seed of the generator.
        split: ``"train"`` or ``"eval"``; other rows each.
        length: Tokens of every row, none of them padding.
        tokenizer: Its vocabulary, special tokens left out, is what is drawn from, each token as likely as any other.

    Returns:
        Columns ``input_ids`` (list of int) and ``label`` (0 or 1, at random), as :func:`.tokens.tokenize` has them.
    """
    generator = np.random.default_rng([seed, zlib.crc32(split.encode())])
    plain = np.setdiff1d(np.arange(len(tokenizer), dtype=np.int32), tokenizer.all_special_ids)
    ids = generator.choice(plain, size=count * length)
    starts = np.arange(0, count * length + 1, length, dtype=np.int32)
    rows = pyarrow.ListArray.from_arrays(starts, ids.astype(np.int32))
    return Dataset(pyarrow.table({"input_ids": rows, "label": generator.integers(0, 2, count)}))


def _builtin(config: DataConfig, split: str, samples: int | None) -> Dataset:
    return Dataset.from_dict(builtin_reviews(samples or 8000, config.seed, split, config.length_scale))


def _from_hub(config: DataConfig, split: str) -> Dataset:
    where = f"data.hub_name {config.hub_name!r}, split {split!r}"
    try:
        dataset = load_dataset(config.hub_name, split=split)
    except Exception as error:  # network, authentication, a missing split: each its own class
        raise DataError(
            f"{where}: cannot be loaded ({type(error).__name__}: {first_line(error)}); "
            "use data.source=files with a local file, or data.source=builtin"
        ) from error
    return _checked(dataset.data.table, config, where)


def _from_file(config: DataConfig, key: str, name: str) -> Dataset:
    path = Path(os.path.expanduser(name))
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"data.{key}: {name} must end in {', '.join(_READERS)}")
    if not os.path.isfile(path):  # pathlib's raises where a name is too long
        raise DataError(f"data.{key}: {with_working_directory(name)} is not a file; give the path of one")
    if path.stat().st_size == 0:
        raise DataError(f"data.{key}: {name} is empty; give a file with reviews in it")
    before = _version(path)
    try:
        table = reader(path)
        after = _version(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise unreadable(f"data.{key}: {name}", [path], error) from error
    if before != after:
        raise DataError(f"data.{key}: {name} changed while it was read; start again when it is written")
    try:
        return _checked(table, config, f"data.{key}: {name}")
    except ValueError as error:  # bytes that are no UTF-8 are read, and are no text
        if fault := not_utf8(path):
            raise DataError(f"data.{key}: {fault}") from error
        raise


def unreadable(where: str, paths: Sequence[Path], error: Exception) -> DataError:
    """The error for files that cannot be read, of which one is perhaps not UTF-8; ``where`` names the key and them."""
    fault = next((fault for path in paths if (fault := not_utf8(path))), None)
    if fault is not None:
        return DataError(f"{where.partition(': ')[0]}: {fault}")
    return DataError(f"{where} cannot be read ({first_line(error)})")


def not_utf8(path: Path) -> str | None:
    """Which byte of a text file makes it no UTF-8, and the way out; None for UTF-8, and for a binary format."""
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
                    f"{before + error.start + 1} of the file); save it as UTF-8, as with: "
                    f"iconv -f {'utf-16' if is_utf16 else 'latin1'} -t utf-8 {path} > new{path.suffix}"
                )
            before += len(line)
    return None


def _checked(table: pyarrow.Table, config: DataConfig, where: str) -> Dataset:
    """Refuse rows that would train silently on nothing, and keep the two columns."""
    for key in ("text_column", "label_column"):
        column = getattr(config, key)
        if column not in table.column_names:
            has = ", ".join(table.column_names) or "none"
            raise DataError(f"{where} has no column {column!r} (it has: {has}); set data.{key}")
    if table.num_rows == 0:
        raise DataError(f"{where} has no rows; give a file with reviews in it")
    try:
        texts, labels = (table.column(getattr(config, key)).to_pylist() for key in ("text_column", "label_column"))
    except (pyarrow.ArrowException, KeyError, ValueError, OverflowError) as error:  # two of one name, no UTF-8, …
        raise DataError(f"{where}: its columns cannot be read ({first_line(error)})") from error
    for row, (text, label) in enumerate(zip(texts, labels, strict=True), start=1):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}, row {row}: {config.text_column} is {_show(text)}; every review needs text")
        if not isinstance(label, (int, float)) or label not in (0, 1):
            raise DataError(f"{where}, row {row}: {config.label_column} is {_show(label)}; it must be 0 or 1")
    return Dataset.from_dict({"text": texts, "label": [int(label) for label in labels]})


def _version(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _show(value: Any) -> str:
    return "empty" if value is None or (isinstance(value, str) and not value.strip()) else repr(value)[:60]


def _sample(dataset: Dataset, config: DataConfig, samples: int | None) -> Dataset:
    """A random draw, as the fine-tuning post makes it; everything when there are fewer."""
    if samples is None or samples >= len(dataset):
        return dataset
    return dataset.shuffle(seed=config.seed).select(range(samples)).flatten_indices()
