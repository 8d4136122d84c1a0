"""Hashes of files by content. Importing this module does not import torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from composer_speedups.core.errors import DataError

WEIGHTS = (".safetensors", ".bin")
TEXTS = (".json", ".txt", ".model")
"""Suffixes of configurations and tokenizers."""
WHOLE = 2**32
"""Bytes of files that are read whole, which takes about a second in the page cache."""
_BLOCKS, _BLOCK = 16, 2**16  # of each file beyond that: number and bytes of the blocks that are read


def model_files(folder: str, kinds: Iterable[str]) -> list[tuple[str, Path]]:
    """Name and path of the files of these kinds in a model's folder; none for a hub id."""
    if not os.path.isdir(folder):
        return []
    return [(path.name, path) for path in sorted(Path(folder).iterdir()) if path.suffix in kinds and path.is_file()]


def hashes_of(files: Sequence[tuple[str, Path]], key: str) -> dict[str, str]:
    """Name → hash of the content. If the files have more than 4 GiB together, the size and 16 blocks of 64 KiB of each
    are hashed, and a change between the blocks that keeps the size is not seen.

    Raises:
        DataError: A file cannot be read; names ``key`` and the file.
    """
    try:
        whole = sum(path.stat().st_size for _, path in files) <= WHOLE
        return {name: _hash(path, whole=whole) for name, path in files}
    except OSError as error:
        raise DataError(f"{key}: {error.filename} cannot be read ({error.strerror})") from error


def _hash(path: Path, *, whole: bool) -> str:
    with open(path, "rb") as file:
        if whole:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
        size = os.fstat(file.fileno()).st_size
        content = xxhash.xxh3_128(str(size))
        for number in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1))
            content.update(file.read(_BLOCK))
        return content.hexdigest()
