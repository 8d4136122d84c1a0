"""torchao's AdamW with 8-bit, 4-bit or fp8 state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any, Literal

from composer.core import State
from torch import nn
from torch.optim import Optimizer

from composer_speedups.algorithms.lowbit_optimizer.torchao_adamw import Bits, lowbit_adamw
from composer_speedups.algorithms.optimizer_state import count_state_bits, embedding_weights, why_not_quantised
from composer_speedups.algorithms.optimizer_swap import UnfitOptimizerError, label_of, swap_optimizer
from composer_speedups.algorithms.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.algorithms.requirements import Context, Requirement, needs_cuda, needs_package
from composer_speedups.algorithms.technique import OnUnavailable

__all__ = ["LowBitOptimizer", "apply_lowbit_optimizer"]

_STATE_BITS = {8: 8, 4: 4, "fp8": 8}


def apply_lowbit_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    bits: Literal[8, 4, "fp8"] = 8,
    embeddings_32bit: bool = True,
    min_size: int = 4096,
    compiled: bool | None = None,
) -> Optimizer:
    """Put torchao's low-bit AdamW in the place of torch's.

    Args:
        model: Says which parameters are embeddings; not changed.
        optimizer: ``torch.optim.AdamW`` that has not stepped; must not step any more.
        bits: Bits a value of either moment: 8, 4, or ``"fp8"`` (e4m3).
        embeddings_32bit: Embeddings keep float32 state; without it, 8-bit and fp8 state makes rows that have
            no gradient in a batch jump.
        min_size: Parameters of fewer values keep float32 state, as do those whose number of values is no
            multiple of the block: 256 values, 128 for 4 bits.
        compiled: Compile the step; None (default) does on a GPU only.

    Returns:
        The new optimizer, or ``optimizer`` if it is that already.

    Raises:
        ValueError: Another number of bits, or an optimizer that cannot be swapped.

    Source: torchao.optim; arXiv 2110.02861 (8 bits), arXiv 2309.01507 (4 bits).
    """
    _check(bits, min_size)
    label = f"torchao AdamW({bits=}, {embeddings_32bit=}, {min_size=})"
    if label_of(optimizer) == label and (before := optimizer.compiled) != compiled:  # type: ignore[attr-defined]
        raise UnfitOptimizerError(  # the label, which checkpoints keep, leaves out what their state does not show
            f"the optimizer is torchao AdamW with compiled={before} already, and compiled={compiled} is asked for",
            "swap a fresh torch.optim.AdamW",
        )
    return swap_optimizer(
        optimizer,
        label,
        lambda groups: lowbit_adamw(
            groups,
            bits,
            full_precision=embedding_weights(model) if embeddings_32bit else (),
            min_size=min_size,
            compiled=compiled,
        ),
    )


def _check(bits: Any, min_size: int) -> None:
    if bits not in (8, 4, "fp8"):
        raise ValueError(f"bits must be 8, 4 or 'fp8', not {bits!r}")
    if min_size < 0:
        raise ValueError(f"min_size must not be negative, and is {min_size}")


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
        _check(bits, min_size)
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
