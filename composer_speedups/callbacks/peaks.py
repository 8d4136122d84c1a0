"""The peak matmul rate of a device, for model FLOPs utilization."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import State

from composer_speedups.core.engaging import techniques_of
from composer_speedups.core.trainer_state import device_of, weight_dtypes

_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Peak(NamedTuple):
    flops_per_sec: float
    precision: str  # fp32, tf32, bf16, fp16, fp8
    source: str  # "datasheet" (dense rates, as Composer lists them) or "measured"


def precision_in_force(state: State) -> str:
    """The precision in which matmuls compute: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.

    Composer's fp32 is TF32 if torch's matmul flag allows it. Techniques may set another precision (see
    ``Technique.matmul_precision``): mixed precision on a CPU, and float8, which also computes some matmuls in bf16.
    """
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


def device_peak(precision: str, device: torch.device) -> Peak:
    """Peak dense matmul rate of one device at a precision.

    For known GPUs it is the datasheet's rate from Composer's table. For other devices, such as CPUs, it is the best
    rate of a few square matmuls that are timed now (less than a second).

    Args:
        precision: From :func:`precision_in_force`. The peak of ``fp8`` is not measured; on devices that are not in the
            table, bf16's is used.
        device: The device.
    """
    if device.type == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Composer's advice on unknown GPUs is about its own SpeedMonitor
            state = SimpleNamespace(precision=SimpleNamespace(value=precision))
            listed = get_gpu_flops_available(state)  # type: ignore[arg-type]
        if listed:
            return Peak(float(listed), precision, "datasheet")
    precision = "bf16" if precision == "fp8" else precision
    return Peak(_measure(precision, device), precision, "measured")


def _measure(precision: str, device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    size = 4096 if on_gpu else 1024
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    generator = torch.Generator(device).manual_seed(0)  # the run's random state must not change
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ b
        if on_gpu:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
