"""The low-bit optimizer technique: torchao's AdamW with 8-bit, 4-bit or fp8 state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from composer.core import State
from pydantic import Field
from torch.optim import Optimizer

from composer_speedups.algorithms.lowbit_optimizer.functional import apply_lowbit_optimizer
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.requirements import (
    Context,
    Requirement,
    needs_cpp_compiler,
    needs_cuda,
    needs_package,
    needs_triton,
)
from composer_speedups.core.technique import Variant

_STATE_BITS = {8: 8, 4: 4, "fp8": 8}


class LowBitOptimizer(OptimizerSwapTechnique):
    """Uses torchao's AdamW with 8-bit, 4-bit or fp8 state; embeddings keep float32 state.

    Raises:
        TechniqueError: At INIT, without torchao, or with an optimizer that is not torch's AdamW.
        NotEngagedError: After the first batch, if no parameter has low-bit state, or embeddings do.
    """

    name = "lowbit_optimizer"
    exactness = "recipe"
    purpose = "saves memory"
    gain = 0.5
    trials = (Variant({"bits": 8}),)

    bits: Literal[8, 4, "fp8"] = Field(8)
    """Bits per value of each moment; fp8 is e4m3."""
    embeddings_32bit: bool = Field(True)
    """Keep float32 state for embeddings."""
    min_size: int = Field(4096, ge=0)
    """Minimum number of values of a parameter with low-bit state."""
    compiled: bool | None = Field(None)
    """Compile the optimizer's step; null compiles it on a GPU only."""

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("torchao", ".[torchao]")
        on_gpu = context.device.type == "cuda"
        if on_gpu and self.compiled is not False:
            yield from needs_triton()
            if self.bits == "fp8":
                yield needs_cuda(context, "compiled fp8 state", (8, 9))
        elif self.compiled:
            yield needs_cpp_compiler("its compiled step", "install it, set CXX, or set compiled=False")

    def swap(self, state: State) -> Optimizer:
        return apply_lowbit_optimizer(
            state.model, state.optimizers[0], self.bits, self.embeddings_32bit, self.min_size, self.compiled
        )

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        embedding_bits = 32 if self.embeddings_32bit else None
        return self.quantised_state(optimizer, state.model, _STATE_BITS[self.bits], embedding_bits, "min_size")
