"""The torch.compile technique, for the whole model or one repeated block."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_cuda, needs_package, needs_triton
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.settings import Check
from composer_speedups.core.technique import Order, Technique

_PACKAGES = {"openxla": "torch_xla", "tvm": "tvm", "onnxrt": "onnxruntime"}  # backend → the package that it imports


class TorchCompile(Technique):
    """Compiles the whole model, or one block whose code the other blocks reuse.

    Raises:
        ValueError: A mode with another backend than inductor.
        Refusal: At INIT, for an unknown backend, if TORCHDYNAMO_DISABLE or a similar variable is set, for inductor on a
            GPU without Triton, for a model without a repeated block (``scope: blocks``), or one that other code has
            compiled.

    Source: torch.nn.Module.compile.
    """

    name = "torch_compile"
    order = Order.COMPILE
    effect = "rounding"

    scope: Literal["model", "blocks"] = Field("model")
    """The whole model, or its repeated block, which starts faster and trains slightly slower."""
    backend: str = Field("inductor")
    """One of torch._dynamo's backends."""
    mode: str | None = Field(None)
    """inductor's mode; null for its default."""
    dynamic: bool | None = Field(None)
    """Dynamic shapes; null decides after a first recompile."""

    def checks(self) -> Iterator[Check]:
        problem = f"{self.mode!r} is a mode of inductor, and the backend is {self.backend!r}; remove one"
        yield self.mode is not None and self.backend != "inductor", "mode", problem

    def reset(self) -> None:
        super().reset()
        self._before: Any = None  # counts of this process when it engaged

    @property
    def fixed_shapes(self) -> bool:
        """Whether the compiled code captures and replays CUDA graphs itself."""
        return self.backend == "cudagraphs" or self.mode in ("reduce-overhead", "max-autotune")

    def needs(self, run: Run) -> Iterable[Refusal]:
        import torch._inductor

        if (off := switched_off()) is not None:
            yield self.refusal(f"{off} is set, which disables torch.compile", "unset it, or remove torch_compile")
        known = torch._dynamo.list_backends(exclude_tags=())
        if self.backend not in known:
            yield self.refusal(f"torch has no backend {self.backend!r}", f"use one of {', '.join(known)}")
        if self.mode is not None and self.mode not in (modes := torch._inductor.list_mode_options()):
            yield self.refusal(f"inductor has no mode {self.mode!r}", f"use one of {', '.join(modes)}")
        if (package := _PACKAGES.get(self.backend)) is not None:
            yield from needs_package(self.name, package, {"tvm": "apache-tvm"}.get(package, package))
        if self.fixed_shapes:
            yield from needs_cuda(self.name, run, f"backend {self.backend!r} with mode {self.mode!r}")
            if "cuda_graphs" in run.techniques:
                reason = "conflicts with cuda_graphs: with this mode or backend, torch_compile captures CUDA graphs too"
                yield self.refusal(reason, "remove torch_compile or cuda_graphs")
        if "unpadding" in run.techniques and (self.fixed_shapes or self.dynamic is False):
            reason = (
                "conflicts with unpadding: with dynamic: false, or a mode that captures CUDA graphs, it would "
                "recompile for each number of tokens"
            )
            yield self.refusal(reason, "remove torch_compile or unpadding")
        if self.backend == "inductor" and run.device.type == "cuda":
            yield from needs_triton(self.name)

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.torch_compile.modules import targets
        from composer_speedups.core.compile_counts import compile_counts

        for module in targets(run.model, self.scope):
            module.compile(backend=self.backend, mode=self.mode, dynamic=self.dynamic)
            run.give_back(setattr, module, "_compiled_call_impl", None)
        self._before = compile_counts()
        return {"scope": self.scope, "backend": self.backend}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        from composer_speedups.algorithms.torch_compile.modules import has_compiled_code

        compiled = [module for module in run.model.modules() if module._compiled_call_impl is not None]
        off = switched_off()  # if so, code compiled earlier is no evidence for this run
        reused = seen.graphs == 0 and off is None and any(map(has_compiled_code, compiled))
        if not compiled or (seen.graphs == 0 and not reused):
            raise self.no_effect(
                "the first batch ran without a compiled graph" + (f": {off} is set" if off else ""),
                f"unset {off}" if off else "do not replace the compiled model after INIT, or remove torch_compile",
            )
        return {"modules": len(compiled), "reused_from_this_process": reused, **self.summary(run)}

    def summary(self, run: Run) -> dict[str, Any]:
        from composer_speedups.core.compile_counts import compile_counts

        since = compile_counts().since(self._before)
        return {
            "graphs": since.graphs,
            "graph_breaks": since.breaks,
            "recompiles": since.recompiles,
            "frames_left_eager": since.failed,
            "compile_seconds": round(since.seconds, 2),
        }


def switched_off() -> str | None:
    """The name of the variable or flag that disables torch.compile; None if it is enabled."""
    import torch

    variables = [name for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE") if os.environ.get(name) == "1"]
    if getattr(torch._dynamo.config, "disable", False):
        variables.append("torch._dynamo.config.disable")
    return next(iter(variables), None)
