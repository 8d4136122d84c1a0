"""Use torch's fused optimizer step."""

from __future__ import annotations

from typing import Any

import torch

from composer_speedups.surgery.optimizer_implementation import set_implementation

__all__ = ["apply_fused_optimizer"]


def apply_fused_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Make a torch optimizer compute its whole update in one kernel for many parameters.

    Args:
        optimizer: Any torch.optim optimizer with a ``fused`` flag; changed in place.

    Returns:
        ``{"optimizer", "groups", "before"}``.

    Raises:
        ValueError: The optimizer has no fused implementation, or its parameters are not floating point.

    Source: torch.optim.AdamW, ``fused``.
    """
    return set_implementation(optimizer, "fused")
