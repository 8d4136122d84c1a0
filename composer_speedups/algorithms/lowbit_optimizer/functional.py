"""Replace torch's AdamW by torchao's with 8-bit, 4-bit or fp8 state."""

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
    """Replace torch's AdamW by torchao's low-bit AdamW.

    Args:
        model: The model, to find out which parameters are embeddings; not changed.
        optimizer: A ``torch.optim.AdamW`` that has not stepped; it must not be used afterwards.
        bits: Bits per value of each moment: 8, 4, or ``"fp8"`` (e4m3).
        embeddings_32bit: Keep float32 state for embeddings. Otherwise, with 8-bit and fp8 state, rows without a
            gradient in a batch make large jumps.
        min_size: Parameters with fewer values keep float32 state. So do parameters whose number of values is not a
            multiple of the block size: 256, or 128 for 4 bits.
        compiled: Whether to compile the step; None (default) compiles on a GPU only.

    Returns:
        The new optimizer, or ``optimizer`` if it is already such a low-bit AdamW.

    Raises:
        ValueError: Another number of bits, or an optimizer that cannot be replaced.

    Source: torchao.optim; arXiv 2110.02861 (8 bits), arXiv 2309.01507 (4 bits).
    """
    if bits not in (8, 4, "fp8"):
        raise ValueError(f"bits must be 8, 4 or 'fp8', not {bits!r}")
    if min_size < 0:
        raise ValueError(f"min_size must be at least 0, not {min_size}")
    label = f"torchao AdamW({bits=}, {embeddings_32bit=}, {min_size=})"
    if label_of(optimizer) == label and (before := optimizer.compiled) != compiled:  # type: ignore[attr-defined]
        # The label does not include ``compiled``: checkpoints save the label, and their state does not depend on it.
        raise UnfitOptimizerError(
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
