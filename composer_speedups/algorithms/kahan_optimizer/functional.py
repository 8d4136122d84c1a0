"""Convert a model to bfloat16 and train it with AdamW and Kahan summation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from composer_speedups.core.trainer_state import is_composer_model
from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError, swap_optimizer

__all__ = ["apply_kahan_optimizer"]

_LABEL = "AdamW(kahan_sum=True)"


def apply_kahan_optimizer(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Convert a model's weights to bfloat16 and return an AdamW with Kahan summation for them.

    Weight, gradient, two moments and compensation take 2 bytes each per parameter, 10 compared with 16 in float32.

    Args:
        model: The model. Its float32 parameters are converted in place and remain the same objects with the same
            names. Buffers keep their dtype. Floating-point inputs of its ``forward`` are cast to bfloat16.
        optimizer: A ``torch.optim.AdamW`` of these parameters that has not stepped; it must not be used afterwards.

    Returns:
        The new optimizer with the same parameters and groups, or ``optimizer`` if it already is a KahanAdamW.

    Raises:
        ValueError: The optimizer is not AdamW or has stepped, a parameter is neither float32 nor bfloat16, or the
            model has BatchNorm.

    Source: torch-optimi's AdamW; Kahan summation as in torchdistX's AnyPrecisionAdamW.
    """
    parameters = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    unfit = next((p.dtype for p in parameters if p.dtype not in (torch.float32, torch.bfloat16)), None)
    if unfit is not None:
        raise UnfitOptimizerError(f"the model has {unfit} parameters", "load it in float32 or bfloat16")
    if any(isinstance(m, _NormBase) and m.running_mean is not None for m in model.modules()):
        raise UnfitOptimizerError("BatchNorm keeps its statistics in float32", "use a model without BatchNorm")
    new = swap_optimizer(optimizer, _LABEL, _build)
    for parameter in parameters:
        if parameter.dtype != torch.bfloat16:
            parameter.grad = None  # its dtype would not match
            parameter.data = parameter.data.to(torch.bfloat16)
    for module in [*model.children()] if is_composer_model(model) else [model]:
        if _to_bfloat16 not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_to_bfloat16, with_kwargs=True)
    return new


def _to_bfloat16(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point inputs, such as images and embeddings, to bfloat16; token ids are not changed."""
    return tree_map(
        lambda x: x.to(torch.bfloat16) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs)
    )


def _build(groups: list[dict[str, Any]]) -> Optimizer:
    from optimi import AdamW

    class KahanAdamW(AdamW):  # checkpoints store the state by class name, which must differ from torch's AdamW
        __qualname__ = "KahanAdamW"

    for group in groups:
        group["beta1"], group["beta2"] = group.pop("betas")
    return KahanAdamW(groups, lr=groups[0]["lr"], kahan_sum=True)
