"""torchao's AdamW with 8-bit, 4-bit or fp8 state."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from composer_speedups.algorithms.lowbit_optimizer.torchao_adamw import lowbit_adamw
from composer_speedups.core.optimizer_evidence import embedding_weights
from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError, label_of, swap_optimizer

__all__ = ["apply_lowbit_optimizer"]


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
    if bits not in (8, 4, "fp8"):
        raise ValueError(f"bits must be 8, 4 or 'fp8', not {bits!r}")
    if min_size < 0:
        raise ValueError(f"min_size must not be negative, and is {min_size}")
    label = f"torchao AdamW({bits=}, {embeddings_32bit=}, {min_size=})"
    if label_of(optimizer) == label and (before := optimizer.compiled) != compiled:  # type: ignore[attr-defined]
        raise UnfitOptimizerError(  # the label, which checkpoints keep, leaves out what their state does not show
            f"the optimizer is torchao AdamW with compiled={before} already, and compiled={compiled} was requested",
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
