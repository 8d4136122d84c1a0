"""torch.compile over the whole model, or over one block that its siblings reuse."""

from __future__ import annotations

import inspect
import os
import shutil
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
    OWN_FOLDER,
    CompileCache,
    check_default_folder,
    folder_problem,
)
from composer_speedups.algorithms.torch_compile.functional import apply_torch_compile, switched_off
from composer_speedups.core.operator_recorder import CompileCounts, compile_counts
from composer_speedups.core.requirements import Context, Requirement, needs_cuda, needs_package
from composer_speedups.core.technique import Stage, Technique, Variant
from composer_speedups.core.trainer_state import device_of, model_of

_PACKAGES = {"openxla": "torch_xla", "tvm": "tvm", "onnxrt": "onnxruntime"}  # backend → the package it imports


class TorchCompile(Technique):
    """torch.compile over the whole model, or one block compiled once and reused by the others.

    Raises:
        ValueError: A mode or a cache, which are inductor's, with another backend.
        TechniqueError: At INIT, for an unknown backend, with TORCHDYNAMO_DISABLE or its like set, inductor without
            Triton (GPU) or a C++ compiler, or a cache that others can write to.
    """

    name = "torch_compile"
    stage = Stage.COMPILE
    exactness = "rounding"
    gain = 1.2
    trials = (Variant({"scope": "blocks"}), Variant({"scope": "model"}))
    not_recorded = (*Technique.not_recorded, "cache")  # a resumed run may have the folder elsewhere

    scope: Literal["model", "blocks"] = Field("model")
    """The whole model, or its repeated block: starts faster and runs a little slower."""
    backend: str = Field("inductor")
    """One of torch._dynamo's backends."""
    mode: str | None = Field(None)
    """inductor's mode; null is its own default."""
    dynamic: bool | None = Field(None)
    """Dynamic shapes; null decides after a first recompile."""
    cache: str | None = Field(None)
    """Folder that keeps what inductor compiled for the next run; null leaves inductor's own cache where it is. Others
    must not be able to write to either, for the run executes what it finds there."""

    def check_settings(self) -> None:
        other = f"and the backend is {self.backend!r}"
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"mode={self.mode!r} is inductor's, {other}; leave one out")
        if self.cache is not None and (self.backend != "inductor" or not self.cache):
            raise ValueError(f"cache={self.cache!r} must be the folder of inductor's cache, {other}")

    def reset(self) -> None:
        super().reset()
        self._before: CompileCounts | None = None
        self._cache: CompileCache | None = None

    def requirements(self, context: Context) -> Iterable[Requirement]:
        off = switched_off()
        yield Requirement(off is None, f"{off} is set, and torch compiles nothing", "unset it, or remove it")
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
            yield needs_package("triton", "triton")
        if self.backend == "inductor":
            compilers = [os.environ.get("CXX", "g++"), "clang++", os.environ.get("CC", "gcc")]
            yield Requirement(
                any(map(shutil.which, compilers)), "inductor needs a C++ compiler", "install g++, or set CXX"
            )
        if self.cache is not None:
            problem = folder_problem(self.cache)
            yield Requirement(problem is None, f"cache: {problem}", OWN_FOLDER)
            yield Requirement(
                not torch._inductor.config.force_disable_caches,
                "cache: inductor's caches are switched off",
                "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES, or leave cache out",
            )

    @property
    def makes_graphs(self) -> bool:
        """Whether the compiled code replays CUDA graphs of its own."""
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
        off = switched_off()  # then code compiled before proves nothing about this run
        reused = since.graphs == 0 and off is None and any(map(_has_compiled_code, compiled.values()))
        if not compiled or (since.graphs == 0 and not reused):
            raise self.not_engaged(
                "the first batch ran without a compiled graph" + (f": {off} is set" if off else ""),
                f"unset {off}" if off else "leave the model compiled after INIT, or remove it",
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
    """Whether dynamo holds compiled code for ``module.forward``, the instance's own if it has one, or what it wraps."""
    function: Any = inspect.unwrap(getattr(module.forward, "__func__", module.forward), stop=_is_compiled)
    return _is_compiled(function)


def _is_compiled(function: Any) -> bool:
    return bool(_debug_get_cache_entry_list(function.__code__))
