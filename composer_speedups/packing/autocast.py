"""The dtype of autocast, for operators that autocast itself does not cast."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(device_type: str, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of autocast on a CPU or GPU; ``otherwise`` if autocast is off, and on other devices, such as meta."""
    enabled = device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else otherwise


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast a tensor to the dtype of autocast; without autocast, return it."""
    return x.to(autocast_dtype(x.device.type, x.dtype))
