"""torchao's AdamW with 8-bit, 4-bit or fp8 state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any, Literal

from composer.core import State
from torch.optim import Optimizer

from composer_speedups.algorithms.lowbit_optimizer.functional import apply_lowbit_optimizer, check_settings
from composer_speedups.algorithms.lowbit_optimizer.torchao_adamw import Bits
from composer_speedups.core.optimizer_state import count_state_bits, embedding_weights, why_not_quantised
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda, needs_package
from composer_speedups.core.technique import OnUnavailable

__all__ = ["LowBitOptimizer"]

_STATE_BITS = {8: 8, 4: 4, "fp8": 8}


class LowBitOptimizer(OptimizerSwapTechnique):
    """torchao's AdamW with 8-bit, 4-bit or fp8 state; embeddings keep float32 state.

    Args:
        bits: 8 (default), 4, or ``"fp8"``.
        embeddings_32bit: Keep float32 state for embeddings (default).
        min_size: Least number of values of a parameter with low-bit state, 4096 by default.
        compiled: Compile the optimizer's step; None (default) does on a GPU only.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: Another number of bits.
        TechniqueError: At INIT, without torchao, or with an optimizer that is not torch's AdamW.
        NotEngagedError: After the first batch, when no parameter has low-bit state, or embeddings do.
    """

    name = "lowbit_optimizer"

    def __init__(
        self,
        bits: Literal[8, 4, "fp8"] = 8,
        embeddings_32bit: bool = True,
        min_size: int = 4096,
        compiled: bool | None = None,
        *,
        on_unavailable: OnUnavailable = "stop",
    ) -> None:
        super().__init__(on_unavailable=on_unavailable)
        check_settings(bits, min_size)
        self.bits: Bits = bits
        self.embeddings_32bit, self.min_size, self.compiled = embeddings_32bit, min_size, compiled

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("torchao", "composer_speedups[torchao]")
        on_gpu = context.device.type == "cuda"
        if on_gpu and self.compiled is not False:
            yield needs_package("triton", "triton")
            if self.bits == "fp8":
                yield needs_cuda(context, "compiled fp8 state", (8, 9))
        elif self.compiled:
            compilers = [os.environ.get("CXX", "g++"), "clang++"]
            yield Requirement(
                any(map(shutil.which, compilers)), "its compiled step needs a C++ compiler", "set compiled=False"
            )

    def swap(self, state: State) -> Optimizer:
        return apply_lowbit_optimizer(
            state.model, state.optimizers[0], self.bits, self.embeddings_32bit, self.min_size, self.compiled
        )

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        counts = count_state_bits(optimizer, embedding_weights(state.model))
        bits = _STATE_BITS[self.bits]
        reason = why_not_quantised(counts, bits, 32 if self.embeddings_32bit else None)
        if reason is not None:
            raise self.not_engaged(
                reason, f"lower min_size ({self.min_size} now), or take it out: the model is too small for it"
            )
        return counts
