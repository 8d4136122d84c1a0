"""The encoder's matmuls in float8."""

from __future__ import annotations

import dataclasses
import warnings
from types import ModuleType
from typing import Literal

import torch
from torch import nn

from composer_speedups.surgery.already_applied import refuse_other_settings

__all__ = ["apply_float8_linear"]
# torch._scaled_mm runs from Ada on; its row-wise kernel is written for Hopper.
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
MULTIPLE = 16  # of both dimensions of a weight


def apply_float8_linear(
    model: nn.Module,
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
    min_features: int = 0,
    emulate: bool = False,
) -> list[str]:
    """Make the Linears of a model's blocks multiply in float8, forward and backward.

    Weights stay in their dtype; inputs, weights and gradients are scaled and cast for each matmul. Pooler and heads
    lie outside of the blocks and are left alone.

    Args:
        model: Changed in place; parameters, names and hooks stay. Train it under autocast.
        recipe: ``"tensorwise"`` (default) has one scale a tensor, ``"rowwise"`` one a row, and
            ``"rowwise_with_gw_hp"`` also leaves the weight's gradient in the autocast dtype.
        min_features: Leave out Linears with fewer inputs or outputs. Default 0; those whose inputs or outputs are
            no multiple of 16 are left out always.
        emulate: Round to float8 and multiply in float32, on any device: for tests, and to learn what float8 does
            to a model. Default False.

    Returns:
        Names of the modules changed; none when the model has the same float8 Linears already.

    Raises:
        ValueError: An unknown recipe, a device without float8 matmuls, or a model that has float8 Linears of other
            settings.

    Source: torchao.float8; Micikevicius et al., arXiv 2209.05433.
    """
    if recipe not in CAPABILITY:
        raise ValueError(f"recipe must be one of {', '.join(CAPABILITY)}, not {recipe!r}")
    if not emulate:
        _check_device(next(model.parameters()).device, recipe)
    modules, names = float8_modules(), []
    settings = {"recipe": recipe, "min_features": min_features, "emulate": emulate}
    converted = converted_layers(model)
    for module in converted.values():
        refuse_other_settings("float8 Linears", modules.settings_of(module), settings)
    if converted:
        return []
    from torchao.float8 import Float8LinearConfig

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    for name, module in _linears_of_blocks(model).items():
        weight = module.weight
        if min(weight.shape) >= min_features and all(size % MULTIPLE == 0 for size in weight.shape):
            modules.to_float8(module, config, settings)
            names.append(name)
    return names


def float8_modules() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # an escape in one of torchao's doc strings, from Python 3.12 on
        from composer_speedups.algorithms.float8_linear import modules
    return modules


def _check_device(device: torch.device, recipe: str) -> None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < CAPABILITY[recipe]:
        wanted = ".".join(map(str, CAPABILITY[recipe]))
        raise ValueError(
            f"{recipe} float8 needs a CUDA GPU of compute capability {wanted} or newer, and the model is on "
            f"{torch.cuda.get_device_name(device) if capability > (0, 0) else f'the {device.type}'}; set emulate=True "
            "to learn its rounding without its speed"
        )


def _linears_of_blocks(model: nn.Module) -> dict[str, nn.Linear]:
    """The plain Linears below a ModuleList: those of the encoder's blocks."""
    lists = [f"{name}." if name else "" for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and any(name.startswith(prefix) for prefix in lists)
    }


def converted_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, float8_modules().RowPaddedFloat8Linear)}
