"""Run a model under autocast, for custom training loops."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import nn

from composer_speedups.surgery.instance_forward import Inner, call_inner, has_forward, replace_forward

__all__ = ["apply_mixed_precision"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE = "_autocast_dtype"  # attribute of a model
LOAD_FLOAT32 = "load the model with dtype=torch.float32"


def apply_mixed_precision(model: nn.Module, dtype: Literal["bf16", "fp16"] = "bf16") -> torch.amp.GradScaler:
    """Run a model's ``forward`` under autocast, in your own training loop.

    In a Composer Trainer, use :class:`MixedPrecision`, which sets the Trainer's precision instead.

    Args:
        model: The model, whose ``forward`` is wrapped in place. The weights that it trains are float32 and remain so.
        dtype: ``"bf16"`` or ``"fp16"``; fp16 needs a GPU.

    Returns:
        A gradient scaler for training; it is disabled for bf16.

    Raises:
        ValueError: Another dtype, fp16 without a GPU, or weights to train that are not float32.

    Source: torch.amp.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be 'bf16' or 'fp16', not {dtype!r}")
    device = next(model.parameters()).device.type
    if dtype == "fp16" and device != "cuda":
        raise ValueError(f"fp16 needs a CUDA GPU, and the model is on the {device}; use bf16")
    if (problem := half_weights(model)) is not None:
        raise ValueError(f"mixed_precision {problem}; {LOAD_FLOAT32}")
    wrap_forward(model, dtype)
    return torch.amp.GradScaler(device, enabled=dtype == "fp16")


def wrap_forward(model: nn.Module, dtype: Literal["bf16", "fp16"]) -> None:
    """Run the model's ``forward`` under autocast from now on."""
    vars(model)[_DTYPE] = DTYPES[dtype]
    if not has_forward(model, _under_autocast):
        signature = inspect.signature(model.forward)  # by which HF Trainer and Composer choose a batch's entries
        plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        forward: Any = replace_forward(model, _under_autocast)
        forward.__signature__ = inspect.Signature(plain)  # without annotations, which cannot all be pickled


def half_weights(model: nn.Module) -> str | None:
    """Describe a 16-bit weight that would be trained; None if there is none.

    The optimizer would update it in 16 bits, and updates below its resolution would be lost.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in DTYPES.values():
            return f"trains float32 weights, and {name} is {str(parameter.dtype).removeprefix('torch.')}"
    return None


def _under_autocast(model: nn.Module, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(_device_of(model).type, vars(model)[_DTYPE]):
        return call_inner(model, inner, *args, **kwargs)


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    # a replica of torch.nn.DataParallel, whose parameters are plain attributes
    values = (value for module in model.modules() for value in vars(module).values())
    return next(value.device for value in values if isinstance(value, torch.Tensor))
