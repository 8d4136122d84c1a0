"""The torch.compile technique, for the whole model or one repeated block."""

from __future__ import annotations

import functools
import inspect
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
import torch._inductor
import torch._inductor.config
from composer.core import State
from pydantic import Field
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from composer_speedups.algorithms.torch_compile.functional import apply_torch_compile, switched_off
from composer_speedups.core.flags import FlagTechnique, ProcessFlag
from composer_speedups.core.operator_recorder import CompileCounts, compile_counts
from composer_speedups.core.requirements import (
    Context,
    Requirement,
    needs_cpp_compiler,
    needs_cuda,
    needs_package,
    needs_triton,
)
from composer_speedups.core.technique import Stage, Technique, Variant
from composer_speedups.core.trainer_state import model_of

_PACKAGES = {"openxla": "torch_xla", "tvm": "tvm", "onnxrt": "onnxruntime"}  # backend → the package that it imports
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # inductor sets the second to a folder in the first
_CACHE_COUNTERS = {  # evidence → torch's counters
    "cache_hits": [("inductor", "fxgraph_cache_hit")],
    "cache_misses": [("inductor", "fxgraph_cache_miss")],
    "cache_bypasses": [("inductor", "fxgraph_cache_bypass"), ("aot_autograd", "autograd_cache_bypass")],
}


def _read_cache_variables() -> list[str | None]:
    return [os.environ.get(name) for name in _CACHE_VARIABLES]


def _write_cache_variables(values: list[str | None]) -> None:
    for name, value in zip(_CACHE_VARIABLES, values, strict=True):
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class TorchCompile(FlagTechnique):
    """Compiles the whole model, or one block whose code the other blocks reuse.

    Raises:
        ValueError: A mode or a cache with another backend than inductor.
        TechniqueError: At INIT, for an unknown backend, if TORCHDYNAMO_DISABLE or a similar variable is set, for
            inductor without Triton (GPU) or a C++ compiler, or for a cache that other users can write to.
    """

    name = "torch_compile"
    stage = Stage.COMPILE
    exactness = "rounding"
    gain = 1.2
    trials = (Variant({"scope": "blocks"}), Variant({"scope": "model"}))
    not_recorded = (*Technique.not_recorded, "cache")  # a resumed run may use another folder

    scope: Literal["model", "blocks"] = Field("model")
    """The whole model, or its repeated block, which starts faster and trains slightly slower."""
    backend: str = Field("inductor")
    """One of torch._dynamo's backends."""
    mode: str | None = Field(None)
    """inductor's mode; null for its default."""
    dynamic: bool | None = Field(None)
    """Dynamic shapes; null decides after a first recompile."""
    cache: str | None = Field(None)
    """Folder that keeps inductor's compiled code for later runs; null uses inductor's default folder. Others must not
    be able to write to the folder, because the run executes code from it."""

    flag = ProcessFlag(_read_cache_variables, _write_cache_variables)

    def check_settings(self) -> None:
        other = f"and the backend is {self.backend!r}"
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"mode={self.mode!r} is a mode of inductor, {other}; remove one")
        if self.cache is not None and (self.backend != "inductor" or not self.cache):
            raise ValueError(f"cache={self.cache!r} must be a folder for inductor's cache, {other}")

    def reset(self) -> None:
        super().reset()
        self._before: CompileCounts | None = None
        self._cache_counts_before: dict[str, int] = {}

    def requirements(self, context: Context) -> Iterable[Requirement]:
        off = switched_off()
        yield Requirement(
            off is None, f"{off} is set, which disables torch.compile", "unset it, or remove torch_compile"
        )
        known = torch._dynamo.list_backends(exclude_tags=())
        yield Requirement(
            self.backend in known, f"torch has no backend {self.backend!r}", f"use one of {', '.join(known)}"
        )
        if self.mode is not None:
            modes = torch._inductor.list_mode_options()
            yield Requirement(
                self.mode in modes, f"inductor has no mode {self.mode!r}", f"use one of {', '.join(modes)}"
            )
        if self.backend in _PACKAGES:
            package = _PACKAGES[self.backend]
            yield needs_package(package, {"tvm": "apache-tvm"}.get(package, package))
        if self.makes_graphs:
            yield needs_cuda(context, f"backend {self.backend!r} with mode {self.mode!r}")
        if self.backend == "inductor" and context.device.type == "cuda":
            yield from needs_triton()
        elif self.backend == "inductor":
            yield needs_cpp_compiler("inductor", "install it, set CXX, or choose another backend")
        if (folder := self._checked_folder) is not None:
            problem = _folder_problem(folder)
            yield Requirement(
                problem is None, f"cache: {problem}", "choose a folder that only you can write to (chmod 700)"
            )
        if self.cache is not None:
            inductor = torch._inductor.config
            yield Requirement(
                inductor.fx_graph_cache and not inductor.force_disable_caches,
                "cache: inductor's caches are disabled",
                "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_FX_GRAPH_CACHE, or remove cache",
            )

    @property
    def _checked_folder(self) -> Path | None:
        """``cache``, or inductor's folder if its name under /tmp is predictable, as by default; otherwise None."""
        if self.backend != "inductor":
            return None
        folder = self.cache or os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
        path = Path(os.path.expanduser(folder)).absolute()
        return path if self.cache is not None or path.parent == Path(tempfile.gettempdir()) else None

    def wanted_flag(self) -> list[str | None]:
        return self.flag.read() if self.cache is None else [str(self._checked_folder), None]

    @property
    def makes_graphs(self) -> bool:
        """Whether the compiled code captures and replays CUDA graphs itself."""
        return self.backend == "cudagraphs" or self.mode in ("reduce-overhead", "max-autotune")

    @property
    def fixed_shapes(self) -> bool:
        return self.makes_graphs

    def engage(self, state: State) -> dict[str, Any]:
        self._before, self._cache_counts_before = compile_counts(), _cache_counts()
        with self.refusals():
            apply_torch_compile(state.model, self.scope, self.backend, self.mode, self.dynamic)
        if self._checked_folder is not None:
            self._checked_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return {"scope": self.scope, "backend": self.backend}

    def verify(self, state: State) -> dict[str, Any]:
        assert self._before is not None
        since = compile_counts().since(self._before)
        compiled = {n: m for n, m in model_of(state).named_modules() if m._compiled_call_impl is not None}
        off = switched_off()  # if so, code compiled earlier is no evidence for this run
        reused = since.graphs == 0 and off is None and any(map(_has_compiled_code, compiled.values()))
        if not compiled or (since.graphs == 0 and not reused):
            raise self.not_engaged(
                "the first batch ran without a compiled graph" + (f": {off} is set" if off else ""),
                f"unset {off}" if off else "do not replace the compiled model after INIT, or remove torch_compile",
            )
        cached = {name: count - self._cache_counts_before[name] for name, count in _cache_counts().items()}
        return {
            "modules": len(compiled),
            "graphs": since.graphs,
            "graph_breaks": since.breaks,
            "recompiles": since.recompiles,
            "frames_left_eager": since.failed,
            "compile_seconds": round(since.seconds, 2),
            "reused_from_this_process": reused,
            **({} if self.cache is None else cached),
        }


def _cache_counts() -> dict[str, int]:
    """Return the numbers of graphs that were found, compiled and not cacheable in this process."""
    return {name: sum(counters[group][key] for group, key in keys) for name, keys in _CACHE_COUNTERS.items()}


def _folder_problem(folder: Path) -> str | None:
    """Return why a folder cannot be created, or its code cannot be trusted; None if there is no problem."""
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


def _has_compiled_code(module: nn.Module) -> bool:
    """Return whether dynamo has compiled code for ``module.forward`` or a function that it wraps."""
    forward: Any = module.forward
    while isinstance(forward, functools.partial):
        forward = forward.func
    return _is_compiled(inspect.unwrap(getattr(forward, "__func__", forward), stop=_is_compiled))


def _is_compiled(function: Any) -> bool:
    code = getattr(function, "__code__", None)  # other callables have none
    return code is not None and bool(_debug_get_cache_entry_list(code))
