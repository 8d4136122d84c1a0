"""The torch.compile technique, for the whole model or one repeated block."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch._inductor
import torch._inductor.config
from composer.core import State
from composer.utils import dist
from pydantic import Field
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from composer_speedups.algorithms.torch_compile.cache import (
    PRIVATE_FOLDER_HINT,
    CompileCache,
    check_default_folder,
    folder_problem,
)
from composer_speedups.algorithms.torch_compile.functional import apply_torch_compile, switched_off
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
from composer_speedups.core.trainer_state import device_of, model_of

_PACKAGES = {"openxla": "torch_xla", "tvm": "tvm", "onnxrt": "onnxruntime"}  # backend → the package that it imports


class TorchCompile(Technique):
    """Compiles the whole model, or one block whose code the other blocks reuse.

    Raises:
        ValueError: A mode or a cache with another backend than inductor.
        TechniqueError: At INIT, for an unknown backend, if TORCHDYNAMO_DISABLE or a similar variable is set, for
            inductor without Triton (GPU) or a C++ compiler, or for a cache that others can write to.
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

    def check_settings(self) -> None:
        other = f"and the backend is {self.backend!r}"
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"mode={self.mode!r} is a mode of inductor, {other}; remove one")
        if self.cache is not None and (self.backend != "inductor" or not self.cache):
            raise ValueError(f"cache={self.cache!r} must be a folder for inductor's cache, {other}")

    def reset(self) -> None:
        super().reset()
        self._before: CompileCounts | None = None
        self._cache: CompileCache | None = None

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
        if self.cache is not None:
            problem = folder_problem(self.cache)
            yield Requirement(problem is None, f"cache: {problem}", PRIVATE_FOLDER_HINT)
            yield Requirement(
                not torch._inductor.config.force_disable_caches,
                "cache: inductor's caches are disabled",
                "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES, or remove cache",
            )

    @property
    def makes_graphs(self) -> bool:
        """Whether the compiled code captures and replays CUDA graphs itself."""
        return self.backend == "cudagraphs" or self.mode in ("reduce-overhead", "max-autotune")

    @property
    def fixed_shapes(self) -> bool:
        return self.makes_graphs

    def engage(self, state: State) -> dict[str, Any]:
        self._before = compile_counts()
        with self.refusals():
            apply_torch_compile(state.model, self.scope, self.backend, self.mode, self.dynamic)
        if self.cache is not None:
            self._cache = CompileCache(self.cache, device_of(state))
            self._cache.open()
        elif self.backend == "inductor":
            check_default_folder()
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
        return {
            "modules": len(compiled),
            "graphs": since.graphs,
            "graph_breaks": since.breaks,
            "recompiles": since.recompiles,
            "frames_left_eager": since.failed,
            "compile_seconds": round(since.seconds, 2),
            "reused_from_this_process": reused,
            **(self._cache.counts() if self._cache is not None else {}),
        }

    def fit_start(self, state: State) -> None:
        if self._cache is not None:
            self._cache.open()

    def fit_end(self, state: State) -> None:
        if self._cache is not None:
            if dist.get_global_rank() == 0:
                self._cache.save()
            self.evidence.update(self._cache.counts())
            self._cache.close()

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()


def _has_compiled_code(module: nn.Module) -> bool:
    """Return whether dynamo has compiled code for ``module.forward`` or a function that it wraps."""
    function: Any = inspect.unwrap(getattr(module.forward, "__func__", module.forward), stop=_is_compiled)
    return _is_compiled(function)


def _is_compiled(function: Any) -> bool:
    return bool(_debug_get_cache_entry_list(function.__code__))
