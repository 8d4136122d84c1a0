"""Files and folders: written whole or not at all; wrong paths named in one line."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_speedups.core.errors import ConfigError, causes_of, first_line

__all__ = [
    "NO_SPACE",
    "cannot_be_loaded",
    "check_folder",
    "make_folder",
    "out_of_space",
    "publish",
    "remove_unfinished",
    "replace_folder",
    "with_working_directory",
    "write_atomically",
    "write_json",
]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the system's errors of a disk, a quota or a limit used up
_PREFIX = ".unfinished-"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_PREFIX, suffix=".tmp", delete=False) as partial:
        try:
            partial.write(data)
            partial.flush()
            os.chmod(partial.name, 0o644)
            publish(Path(partial.name), path)
        except BaseException:
            os.unlink(partial.name)
            raise


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that appears whole or not at all. JSON has no NaN and no infinity: they become null."""
    write_atomically(path, json.dumps(_finite(content), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def publish(partial: Path, path: Path) -> None:
    """Give a file its name once its content is on the disk; what had the name before is there until then."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself
    finally:
        os.close(folder)


@contextmanager
def replace_folder(folder: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of ``folder`` when the block ends without an error.

    With ``keep_existing`` one that another process has made meanwhile stays, and what was filled goes.
    """
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{_PREFIX}{folder.name}."))
    try:
        yield partial
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
    """Take away what a killed process was writing to ``folder`` by the functions above."""
    for path in folder.glob(f"{_PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def make_folder(path: Path, key: str) -> Path:
    """Create a folder that the config key ``key`` asks for.

    Raises:
        ConfigError: It cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        shown = with_working_directory(path)
        raise ConfigError(f"{key}: {shown} cannot be made ({error.strerror}); choose another folder") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{key}: {with_working_directory(path)} cannot be written to; choose another folder")
    return path


def check_folder(name: str, key: str) -> str:
    """A folder's path with its ``~`` expanded, or a name as it is, which may be the hub's.

    Raises:
        ConfigError: It begins with ``/``, ``.`` or ``~``, and is no folder.
    """
    if not name.startswith(("/", ".", "~")):
        return name
    expanded = os.path.expanduser(name)
    if not os.path.isdir(expanded):
        shown = with_working_directory(name)
        raise ConfigError(f"{key}: {shown} is no folder; give an existing one, or a name of the hub")
    return expanded


def cannot_be_loaded(key: str, name: str, error: BaseException, fix: str) -> ConfigError:
    """The error for what is neither a usable folder nor to be had from the hub under that name."""
    here = "" if os.path.isdir(name) else f", and there is no folder {with_working_directory(name)}"
    return ConfigError(f"{key}: {name!r} cannot be loaded ({first_line(error)}){here}; {fix}")


def with_working_directory(path: str | os.PathLike[str]) -> str:
    """A path for an error message; after a relative one, the folder that it is relative to."""
    name = os.fspath(path)
    absolute = os.path.isabs(name) or name.startswith("~") or "://" in name
    return name if absolute else f"{name} (relative to {os.getcwd()})"


def out_of_space(error: BaseException) -> str | None:
    """What the system said, where an error comes of a full disk; None where it does not."""
    for cause in causes_of(error):
        # safetensors has the number in its text only
        spelled = re.search(r"\(os error (\d+)\)", str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(spelled[1]) if spelled else None
        if number in NO_SPACE:
            return str(cause)
    return None
