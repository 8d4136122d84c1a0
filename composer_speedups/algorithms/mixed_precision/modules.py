"""A model's ``forward`` under autocast."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from composer_speedups.core.reversible import Inner, call_inner, replace_forward


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Run the model's ``forward`` under autocast from now on."""
    signature = inspect.signature(model.forward)  # by which HF Trainer and Composer choose a batch's entries
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    forward: Any = replace_forward(model, _under_autocast, dtype)
    forward.__signature__ = inspect.Signature(plain)  # without annotations, which cannot all be pickled


def _under_autocast(model: nn.Module, inner: Inner, dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(next(model.parameters()).device.type, dtype):
        return call_inner(model, inner, *args, **kwargs)
