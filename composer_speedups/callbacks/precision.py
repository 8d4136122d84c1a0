"""The precision in which matmuls compute, and the device's peak rate in it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import NamedTuple

import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import State

from composer_speedups.core.engaging import techniques_of
from composer_speedups.core.trainer_state import device_of, weight_dtypes

_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def precision_in_force(state: State) -> str:
    """The precision in which most matmuls compute: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``."""
    set_by_techniques = {t.matmul_precision for t in techniques_of(state.algorithms) if t.engaged} - {None}
    for precision in ("fp8", "bf16", "fp16"):  # float8 replaces the matmuls of mixed precision
        if precision in set_by_techniques:
            return precision
    if state.precision.value != "fp32":
        return str(state.precision.value).removeprefix("amp_")
    sizes = weight_dtypes(state.model)  # without autocast, weights compute in their own dtype
    most = max(sizes, key=sizes.__getitem__, default=torch.float32)
    if most in _HALF:
        return _HALF[most]
    tf32 = device_of(state).type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else "fp32"


class Peak(NamedTuple):
    flops_per_sec: float  # of dense matmuls
    precision: str  # see precision_in_force


def device_peak(precision: str, device: torch.device) -> Peak | None:
    """The peak rate of a GPU at a precision, as Composer lists the datasheet's; None if it does not."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Composer's advice on unknown GPUs is about its own SpeedMonitor
        state = SimpleNamespace(precision=SimpleNamespace(value=precision))
        listed = get_gpu_flops_available(state)  # type: ignore[arg-type]
    return Peak(float(listed), precision) if listed else None
