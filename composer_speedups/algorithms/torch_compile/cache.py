"""A persistent compile cache: inductor's folder, and torch's portable artifacts in a file next to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from composer_speedups.core.errors import ConfigError
from composer_speedups.core.files import write_atomically
from composer_speedups.core.private_folders import make_own_folder, make_private_folder, others_can_write

KEY = "algorithms.torch_compile.cache"
PRIVATE_FOLDER_HINT = "choose a folder that only you can write to (chmod 700)"
PORTABLE_FILE = "portable.bin"
_MAGIC = b"composer_speedups compile cache 1\n"
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # inductor sets the second to a folder in the first
_COUNTED = {  # evidence → torch's counters
    "cache_hits": [("inductor", "fxgraph_cache_hit")],
    "cache_misses": [("inductor", "fxgraph_cache_miss")],
    "cache_bypasses": [("inductor", "fxgraph_cache_bypass"), ("aot_autograd", "autograd_cache_bypass")],
}


class CompileCache:
    """Inductor's caches in a persistent folder, and in a file that can be copied to another machine.

    While the cache is open, TORCHINDUCTOR_CACHE_DIR is ``folder/inductor``: graphs, kernels and autotuning results.
    ``folder/portable.bin`` has the artifacts of ``torch.compiler.save_cache_artifacts`` from the last run that compiled
    something. It is loaded if ``folder/inductor`` is missing, so a folder with only this file is a warm cache. If it is
    damaged, or was written with another torch or on another device, a warning is raised and the file is replaced.

    Artifacts contain pickles and machine code. Therefore a folder that others can write to is refused, and so is a file
    that others could have written. Use only files from people whose code you would run.

    Args:
        folder: Created when the cache is opened.
        device: The device to compile for.

    Raises:
        ConfigError: On opening, if the folder cannot be created or written to, or others can write to it.
    """

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        self.folder, self.device = Path(os.path.expanduser(folder)).absolute(), device
        self.file_state = "none yet"
        self._flags: contextlib.ExitStack | None = None
        self._counts_before = _counts()

    def open(self) -> None:
        """Make inductor use this cache; does nothing if it is already open."""
        if self._flags is not None:
            return
        try:
            self.folder = make_own_folder(self.folder, KEY, PRIVATE_FOLDER_HINT)
            begins = not (self.folder / "inductor").exists()
            inductor = make_private_folder(self.folder / "inductor", KEY, PRIVATE_FOLDER_HINT)
        except OSError as error:
            raise ConfigError(
                f"{KEY}: {self.folder} cannot be created ({error.strerror}); choose another folder"
            ) from error
        self._flags = contextlib.ExitStack()
        self._flags.callback(_write_variables, {name: os.environ.get(name) for name in _VARIABLES})
        _write_variables({"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TRITON_CACHE_DIR": None})
        self._flags.enter_context(torch._inductor.config.patch(fx_graph_cache=True))
        self._flags.enter_context(torch._functorch.config.patch(enable_autograd_cache=True))
        if begins:
            self._load()
        elif (self.folder / PORTABLE_FILE).exists():
            self.file_state = "not needed"

    def close(self) -> None:
        """Restore the process's flags and environment variables."""
        if self._flags is not None:
            self._flags.close()
            self._flags = None

    def counts(self) -> dict[str, Any]:
        """Return the numbers of graphs found, compiled and not cacheable since this object was created."""
        return {name: now - self._counts_before[name] for name, now in _counts().items()} | {
            "cache_file": self.file_state
        }

    def save(self) -> None:
        """Write the portable file atomically if this run compiled something or there is none."""
        path = self.folder / PORTABLE_FILE
        if self.counts()["cache_misses"] == 0 and path.exists() and self.file_state != "refused":
            return
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            return
        artifacts = saved[0]
        header = {**_made_by(self.device), "sha256": hashlib.sha256(artifacts).hexdigest()}
        try:
            write_atomically(path, _MAGIC + json.dumps(header).encode() + b"\n" + artifacts)
        except OSError as error:
            warnings.warn(f"{KEY}: {path} was not written ({error.strerror})", UserWarning, stacklevel=2)
        else:
            self.file_state = "written"

    def _load(self) -> None:
        path = self.folder / PORTABLE_FILE
        if not path.exists():
            return
        try:
            artifacts = _read(path, self.device)
            if torch.compiler.load_cache_artifacts(artifacts) is None:
                raise ValueError("torch cannot read its artifacts")
        except Exception as error:  # unpickling and writing artifacts may raise anything
            self.file_state = "refused"
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(f"{KEY}: {path} is ignored, and everything is compiled: {reason}", UserWarning, stacklevel=2)
        else:
            self.file_state = "loaded"


def _read(path: Path, device: torch.device) -> bytes:
    if problem := others_can_write(path):
        raise ValueError(f"others could have written it: {problem}")
    magic, _, rest = path.read_bytes().partition(b"\n")
    if magic + b"\n" != _MAGIC:
        raise ValueError("it is not a compile cache")
    line, _, artifacts = rest.partition(b"\n")
    header = json.loads(line)
    if header.pop("sha256") != hashlib.sha256(artifacts).hexdigest():
        raise ValueError("it is damaged")
    if header != (here := _made_by(device)):
        raise ValueError(f"it was written with {_format(header)}, and this is {_format(here)}")
    return artifacts


def _made_by(device: torch.device) -> dict[str, str]:
    """Return what artifacts depend on; torch would silently skip unusable artifacts one by one."""
    if device.type == "cuda":
        return {"torch": torch.__version__, "device": torch.cuda.get_device_name(device)}
    return {"torch": torch.__version__, "device": f"cpu {torch.backends.cpu.get_cpu_capability()}"}


def _format(made_by: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in made_by.items())


def _counts() -> dict[str, int]:
    return {name: sum(counters[group][key] for group, key in keys) for name, keys in _COUNTED.items()}


def _write_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def folder_problem(folder: str) -> str | None:
    """Return why a folder cannot be created, or its code cannot be trusted; None if there is no problem."""
    path = Path(os.path.expanduser(folder)).absolute()
    try:
        existing = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        return f"{folder[:80]} cannot be accessed ({error.strerror})"
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if not os.access(existing, os.W_OK):
        return f"{existing} cannot be written to"
    problem = others_can_write(Path(os.path.realpath(path)))
    return problem and f"others could put code into {path}: {problem}"


def check_default_folder() -> None:
    """Create inductor's default folder, whose name under /tmp is predictable, before another user can.

    Raises:
        ConfigError: It belongs to another user, or others can write to it.
    """
    with contextlib.suppress(OSError, KeyError):  # it cannot be created; inductor will raise the error
        default = default_cache_dir()
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default) == default:
            make_own_folder(Path(default), KEY, PRIVATE_FOLDER_HINT)
