"""Make the Linears of a model's blocks multiply in float8."""

from __future__ import annotations

import dataclasses
import warnings
from types import ModuleType
from typing import Literal

from torch import nn

from composer_speedups.core.requirements import unsuitable_device
from composer_speedups.surgery.already_applied import refuse_other_settings

__all__ = ["apply_float8_linear"]
# torch._scaled_mm needs Ada or newer, its row-wise kernel Hopper.
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
MULTIPLE = 16  # both dimensions of a weight must be a multiple of it


def apply_float8_linear(
    model: nn.Module,
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
    min_features: int = 0,
    emulate: bool = False,
) -> list[str]:
    """Make the Linears of a model's blocks multiply in float8, forward and backward.

    Weights keep their dtype; inputs, weights and gradients are scaled and cast for each matmul. Pooler and heads are
    outside of the blocks and are not changed.

    Args:
        model: The model; changed in place, except for parameters, names and hooks. Train it under autocast.
        recipe: ``"tensorwise"`` (default) has one scale per tensor, ``"rowwise"`` one per row, and
            ``"rowwise_with_gw_hp"`` also computes the weight's gradient in the autocast dtype.
        min_features: Do not convert Linears with fewer inputs or outputs. Default 0. Linears whose inputs or outputs
            are not a multiple of 16 are never converted.
        emulate: Round to float8 and multiply in float32, on any device, for tests and to see float8's effect on a
            model. Default False.

    Returns:
        Names of the converted modules; empty if the model already has the same float8 Linears.

    Raises:
        ValueError: An unknown recipe, a device without float8 matmuls, or a model that has float8 Linears with other
            settings.

    Source: torchao.float8; Micikevicius et al., arXiv 2209.05433.
    """
    if recipe not in CAPABILITY:
        raise ValueError(f"recipe must be one of {', '.join(CAPABILITY)}, not {recipe!r}")
    if not emulate:
        reason = unsuitable_device(next(model.parameters()).device, f"{recipe} float8", CAPABILITY[recipe])
        if reason is not None:
            raise ValueError(f"{reason}; set emulate=True to see the effect of its rounding")
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
        warnings.simplefilter("ignore", SyntaxWarning)  # raised by Python 3.12 for a docstring of torchao
        from composer_speedups.algorithms.float8_linear import modules
    return modules


def _linears_of_blocks(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the plain Linears inside a ModuleList, that is, in the encoder's blocks."""
    lists = [f"{name}." if name else "" for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and any(name.startswith(prefix) for prefix in lists)
    }


def converted_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, float8_modules().RowPaddedFloat8Linear)}
