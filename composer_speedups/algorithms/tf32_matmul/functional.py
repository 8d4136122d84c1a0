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

    Source: torch.set_float32_matmul_precision.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    return before
