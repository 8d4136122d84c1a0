"""Use torch's fused optimizer step, with torch's kernel or a Triton kernel."""

from __future__ import annotations

from typing import Any, Literal

import torch

from composer_speedups.algorithms.fused_optimizer.triton_step import TritonStep, reason_against, triton_step_of
from composer_speedups.core.requirements import needs_triton, require
from composer_speedups.surgery.optimizer_implementation import set_implementation

__all__ = ["apply_fused_optimizer"]

Kernel = Literal["torch", "triton"]


def apply_fused_optimizer(optimizer: torch.optim.Optimizer, kernel: Kernel = "torch") -> dict[str, Any]:
    """Make a torch optimizer compute its whole update in one kernel for many parameters.

    Args:
        optimizer: Any torch.optim optimizer with a ``fused`` flag; changed in place.
        kernel: ``"torch"``, or ``"triton"`` for this package's kernel, which needs AdamW with contiguous float32
            parameters on a CUDA GPU and computes all parameters of a group in one launch. It does not support loss
            scaling: with a ``GradScaler``, torch's kernel runs.

    Returns:
        ``{"optimizer", "groups", "before"}``.

    Raises:
        ValueError: The optimizer has no fused implementation, its parameters are not floating point, or the kernel does
            not support it, or Triton or its C compiler is missing.

    Source: torch.optim.AdamW, ``fused``.
    """
    if kernel not in ("torch", "triton"):
        raise ValueError(f"kernel must be 'torch' or 'triton', not {kernel!r}")
    if kernel == "triton" and (reason := reason_against(optimizer)) is not None:
        raise ValueError(f"kernel='triton' {reason}")
    if kernel == "triton":
        require(needs_triton())
    changed = set_implementation(optimizer, "fused")
    installed = triton_step_of(optimizer)
    if kernel == "torch" and installed is not None:
        installed.remove()
    elif kernel == "triton" and installed is None:
        TritonStep().install(optimizer)
    return changed
