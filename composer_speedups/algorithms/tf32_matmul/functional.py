"""Set the precision of float32 matmuls."""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["apply_tf32_matmul"]


def apply_tf32_matmul(precision: Literal["highest", "high", "medium"] = "high") -> str:
    """Set the precision of float32 matmuls in this process.

    Args:
        precision: ``"high"`` for TF32 (10 mantissa bits), ``"medium"`` to allow bf16 (7 bits), ``"highest"``
            for plain float32.

    Returns:
        The previous setting; call the function with it to restore it.

    Raises:
        ValueError: Another precision.

    Source: torch.set_float32_matmul_precision.
    """
    if precision not in ("highest", "high", "medium"):
        raise ValueError(f"precision must be 'highest', 'high' or 'medium', not {precision!r}")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    return before
