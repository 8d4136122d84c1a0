"""Paths, patterns and addresses of files; quick to import."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from composer_speedups.core.errors import DataError, first_line
from composer_speedups.core.files import with_working_directory

TEXT_FORMATS = (".csv", ".tsv", ".jsonl", ".conll", ".txt")


def check_file(path: str, key: str) -> None:
    """Refuse a file of another format, and a local one that is missing or empty; ``key`` names it in the config."""
    if suffix_of(path) not in (".parquet", *TEXT_FORMATS):
        raise DataError(f"{key}: {path} must end in .parquet, {', '.join(TEXT_FORMATS)}")
    if is_address(path):
        return
    if not os.path.isfile(path):  # pathlib raises for names that are too long
        raise DataError(f"{key}: {with_working_directory(path)} is not a file; name an existing one")
    if os.path.getsize(path) == 0:
        raise DataError(f"{key}: {path} is empty; use a file with samples")


def find_files(name: str, key: str) -> list[str]:
    """The file that a path or an address for fsspec names, or all that match a pattern, in the order of their names."""
    path = os.path.expanduser(name)
    paths = [path]
    if is_address(path) and glob.has_magic(path):
        import fsspec  # takes longer than all other imports of this module

        try:
            paths = [file.full_name for file in fsspec.open_files(path)]
        except (OSError, ValueError, ImportError, TypeError) as error:  # a package may be missing, or an argument
            raise DataError(f"{key}: {path} cannot be read ({first_line(error)})") from error
    elif glob.has_magic(path) and not os.path.isfile(path):
        paths = sorted(glob.glob(path, recursive=True))
    if not paths:
        raise DataError(f"{key}: there is no file {with_working_directory(name)}")
    for path in paths:
        check_file(path, key)
    return paths


def is_address(path: str) -> bool:
    """Whether it is an address that fsspec opens, such as ``s3://bucket/train.csv``, and not a local path."""
    return "://" in path


def suffix_of(path: str) -> str:
    return Path(path).suffix.lower()
