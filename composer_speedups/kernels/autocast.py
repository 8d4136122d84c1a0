"""The dtype of autocast, for operators that autocast itself does not cast."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "to_autocast_dtype"]


def autocast_dtype(device_type: str, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of autocast on a device type; ``otherwise`` if autocast is off."""
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)  # which torch refuses for meta tensors
    return torch.get_autocast_dtype(device_type) if enabled else otherwise


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast a tensor to the dtype of autocast; without autocast, return it."""
    return x.to(autocast_dtype(x.device.type, x.dtype))
