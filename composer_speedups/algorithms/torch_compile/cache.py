"""inductor's cache of compiled code on disk."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from composer_speedups.core.reversible import ProcessFlag

_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # inductor sets the second to a folder in the first
_COUNTERS = {  # evidence → torch's counters
    "cache_hits": [("inductor", "fxgraph_cache_hit")],
    "cache_misses": [("inductor", "fxgraph_cache_miss")],
    "cache_bypasses": [("inductor", "fxgraph_cache_bypass"), ("aot_autograd", "autograd_cache_bypass")],
}


def _read() -> list[str | None]:
    return [os.environ.get(name) for name in _VARIABLES]


def _write(values: list[str | None]) -> None:
    for name, value in zip(_VARIABLES, values, strict=True):
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


CACHE_FOLDERS = ProcessFlag(_read, _write)


def cache_counts() -> dict[str, int]:
    """The numbers of graphs that were found, compiled and not cacheable in this process."""
    return {name: sum(counters[group][key] for group, key in keys) for name, keys in _COUNTERS.items()}


def checked_folder(cache: str | None) -> Path | None:
    """``cache``, or inductor's folder if its name under /tmp is predictable, as by default; otherwise None."""
    folder = cache or os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    path = Path(os.path.expanduser(folder)).absolute()
    return path if cache is not None or path.parent == Path(tempfile.gettempdir()) else None


def folder_problem(folder: Path) -> str | None:
    """Why a folder cannot be created, or its code cannot be trusted; None if there is no problem."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        status = existing.stat()
    except OSError as error:
        return f"{str(folder)[:80]} cannot be accessed ({error.strerror})"
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if existing == folder and (status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH):
        return f"others could put code into {folder}"
    return None if os.access(existing, os.W_OK) else f"{existing} cannot be written to"
