"""Make a model's LayerNorms compute in the autocast dtype."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from composer_speedups.algorithms.fast_layernorm.layers import LAYERS, Implementation, is_supported
from composer_speedups.core.requirements import (
    Context,
    Requirement,
    needs_c_compiler,
    needs_cuda,
    needs_package,
    require,
)
from composer_speedups.packing.derived_classes import swap_class
from composer_speedups.surgery.already_applied import NoEffectWarning, refuse_other_settings

__all__ = ["apply_fast_layernorm"]


def apply_fast_layernorm(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    implementation: Literal["low_precision", "triton", "apex"] = "low_precision",
) -> list[str]:
    """Make every ``torch.nn.LayerNorm`` of a model compute in the autocast dtype.

    Args:
        model: The model. The class of its LayerNorms is replaced in place; their parameters, names and hooks do not
            change. With ``"triton"`` and ``"apex"``, the model then runs on a GPU only, and LayerNorms without a weight
            or bias are not changed.
        optimizers: Ignored; Composer's functional API passes it.
        implementation: ``"low_precision"`` is torch's kernel with input, weights and output in the autocast dtype;
            without autocast, nothing changes. ``"triton"`` is Liger's kernel and ``"apex"`` NVIDIA Apex's; both also
            replace torch's kernel without autocast.

    Returns:
        Names of the changed modules.

    Raises:
        ValueError: The implementation is unknown or cannot run on this machine, or the model already has another one.

    Source: Composer's LowPrecisionLayerNorm; Liger Kernel (arXiv 2410.10989); NVIDIA Apex.
    """
    del optimizers
    if implementation not in LAYERS:
        raise ValueError(f"implementation must be one of {', '.join(LAYERS)}, not {implementation!r}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require(requirements_of(implementation, Context(device)))
    for other, cls in LAYERS.items():
        if modules_of_class(model, cls):
            refuse_other_settings("fast LayerNorms", {"implementation": other}, {"implementation": implementation})
    names = swap_class(model, nn.LayerNorm, LAYERS[implementation], lambda module: is_supported(module, implementation))
    unchanged = unchanged_layernorms(model)
    if unchanged:
        reason = f"not changed, because {supported_modules(implementation)}: {', '.join(unchanged)}"
        warnings.warn(NoEffectWarning(reason), stacklevel=2)
    elif not modules_of_class(model, LAYERS[implementation]):
        warnings.warn(NoEffectWarning("no torch.nn.LayerNorm was found in the model"), stacklevel=2)
    return names


def requirements_of(implementation: Implementation, context: Context) -> Iterable[Requirement]:
    """What an implementation requires of the machine; ``"low_precision"`` requires nothing."""
    if implementation == "triton":
        yield needs_cuda(context, "Liger's Triton kernel", (7, 0))
        yield needs_package("liger_kernel", ".[liger]")
        yield needs_c_compiler("Triton")
    if implementation == "apex":
        yield needs_cuda(context, "Apex's kernel", (7, 0))
        yield Requirement(
            all(importlib.util.find_spec(module) for module in ("apex", "fused_layer_norm_cuda")),
            "Apex is not installed with its CUDA extensions",
            "build the repository NVIDIA/apex on GitHub with its CUDA extensions; pip install apex installs an "
            "unrelated project",
        )


def modules_of_class(model: nn.Module, cls: type[nn.Module]) -> list[nn.Module]:
    """Return the modules of exactly this class, without subclasses."""
    return [m for m in model.modules() if type(m) is cls]


def unchanged_layernorms(model: nn.Module) -> list[str]:
    """Return the names of the modules that are still ``torch.nn.LayerNorm``."""
    return [name for name, module in model.named_modules() if type(module) is nn.LayerNorm]


def supported_modules(implementation: Implementation) -> str:
    """Return which LayerNorms a fused kernel supports, for messages."""
    needs = "a weight, a bias and one normalized dimension" if implementation == "triton" else "a weight and a bias"
    return f"{implementation} needs {needs}"
