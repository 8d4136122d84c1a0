"""Use torch's multi-tensor optimizer step."""

from __future__ import annotations

from typing import Any

import torch

from composer_speedups.surgery.optimizer_implementation import set_implementation

__all__ = ["apply_foreach_optimizer"]


def apply_foreach_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Make a torch optimizer update all parameters of a group with a few multi-tensor kernels.

    Args:
        optimizer: Any torch.optim optimizer with a ``foreach`` flag; changed in place.

    Returns:
        ``{"optimizer", "groups", "before"}``.

    Raises:
        ValueError: The optimizer has no foreach implementation, or a learning rate that is a tensor without being
            capturable.

    Source: torch.optim.AdamW, ``foreach``.
    """
    return set_implementation(optimizer, "foreach")
