"""LayerNorm in the autocast dtype."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import State, get_precision_context
from torch import Tensor, nn
from torch.nn import functional as F

from composer_speedups.algorithms.requirements import Context, Requirement, needs_autocast
from composer_speedups.algorithms.surgery import swap_class
from composer_speedups.algorithms.technique import OnUnavailable, Stage, Technique
from composer_speedups.errors import TechniqueError
from composer_speedups.state import device_of

__all__ = ["FastLayerNorm", "LowPrecisionLayerNorm", "apply_fast_layernorm"]


class LowPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm that takes and gives the autocast dtype; without autocast, plain LayerNorm.

    Statistics are still accumulated in float32 by torch's kernel; inputs, weights and outputs are rounded.
    Composer's LPLayerNorm does the same on a GPU but does not see the CPU's autocast.
    """

    def forward(self, input: Tensor) -> Tensor:
        device_type = input.device.type
        if not torch.is_autocast_enabled(device_type):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device_type)
        weight, bias = (p if p is None else p.to(dtype) for p in (self.weight, self.bias))
        with torch.autocast(device_type, enabled=False):
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


def apply_fast_layernorm(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    implementation: Literal["low_precision"] = "low_precision",
) -> list[str]:
    """Make every ``torch.nn.LayerNorm`` of a model compute in the autocast dtype.

    Args:
        model: Changed in place; parameters, their names and hooks stay as they are.
        optimizers: Taken for Composer's convention; nothing needs changing in them.
        implementation: ``"low_precision"``.

    Returns:
        Names of the modules changed.

    Source: Composer's LowPrecisionLayerNorm.
    """
    del optimizers
    if implementation != "low_precision":
        raise ValueError(f"implementation must be 'low_precision', not {implementation!r}")
    names = swap_class(model, nn.LayerNorm, LowPrecisionLayerNorm)
    if not names and not _swapped(model):
        warnings.warn(NoEffectWarning("no torch.nn.LayerNorm was found in the model"), stacklevel=2)
    return names


def _swapped(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, LowPrecisionLayerNorm)]


class FastLayerNorm(Technique):
    """LayerNorm in the autocast dtype, so that the residual stream stays in it too.

    Args:
        implementation: ``"low_precision"`` (default).
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: Another implementation.
        TechniqueError: At INIT, without mixed precision or without a LayerNorm in the model.
    """

    name = "fast_layernorm"
    stage = Stage.SURGERY

    def __init__(
        self,
        implementation: Literal["low_precision"] = "low_precision",
        *,
        on_unavailable: OnUnavailable = "stop",
    ) -> None:
        super().__init__(on_unavailable=on_unavailable)
        if implementation != "low_precision":
            raise ValueError(f"implementation must be 'low_precision', not {implementation!r}")
        self.implementation: Literal["low_precision"] = implementation

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_autocast(context, "low-precision LayerNorm")

    def engage(self, state: State) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)  # said as an error below
            apply_fast_layernorm(state.model, state.optimizers, self.implementation)
        modules = _swapped(state.model)
        if not modules:
            raise TechniqueError(self.name, "the model has no torch.nn.LayerNorm", "take it out")
        return {"modules": len(modules), "implementation": self.implementation}

    def verify(self, state: State) -> dict[str, Any]:
        module = _swapped(state.model)[0]
        assert isinstance(module, LowPrecisionLayerNorm)
        device = device_of(state)
        sample = torch.ones(2, *module.normalized_shape, device=device)
        cpu_autocast = torch.autocast("cpu", torch.bfloat16, enabled=device.type == "cpu")
        with torch.no_grad(), get_precision_context(state.precision, state.precision_config), cpu_autocast:
            dtype = module(sample).dtype
        if dtype == torch.float32:
            raise self.not_engaged("its output is still float32", "keep mixed precision on")
        return {"output_dtype": str(dtype).removeprefix("torch.")}
