"""LayerNorm in the autocast dtype, by torch's kernel or by one of Liger's or Apex's."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Event, State, get_precision_context
from torch import nn

from composer_speedups.algorithms.applied import refuse_other_settings
from composer_speedups.algorithms.fast_layernorm.layers import LAYERS, Implementation, LowPrecisionLayerNorm, fits
from composer_speedups.algorithms.fast_layernorm.outputs import Outputs, in_compiled_graphs, is_of
from composer_speedups.algorithms.requirements import (
    Context,
    Requirement,
    needs_autocast,
    needs_cuda,
    needs_package,
)
from composer_speedups.algorithms.surgery import swap_class
from composer_speedups.algorithms.technique import OnUnavailable, Stage, Technique
from composer_speedups.errors import TechniqueError
from composer_speedups.state import device_of, is_compiled

__all__ = ["FastLayerNorm", "LowPrecisionLayerNorm", "apply_fast_layernorm"]


def apply_fast_layernorm(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    implementation: Literal["low_precision", "triton", "apex"] = "low_precision",
) -> list[str]:
    """Make every ``torch.nn.LayerNorm`` of a model compute in the autocast dtype.

    Args:
        model: Changed in place; parameters, their names and hooks stay as they are. Under ``"triton"`` and
            ``"apex"`` it runs on a GPU only, and LayerNorms without weight and bias are left alone.
        optimizers: Taken for Composer's convention; nothing needs changing in them.
        implementation: ``"low_precision"`` is torch's kernel on 16-bit values under autocast; ``"triton"`` is
            Liger's kernel and ``"apex"`` NVIDIA Apex's, with and without autocast.

    Returns:
        Names of the modules changed.

    Raises:
        ValueError: An unknown implementation, one that cannot run here, or a model that has another one.

    Source: Composer's LowPrecisionLayerNorm; Liger Kernel (arXiv 2410.10989); NVIDIA Apex.
    """
    del optimizers
    _check(implementation)
    for met, reason, fix in _requirements(implementation, Context(_any_device())):
        if not met:
            raise ValueError(f"{reason}; {fix}")
    for other, cls in LAYERS.items():
        if _of_class(model, cls):
            refuse_other_settings("fast LayerNorms", {"implementation": other}, {"implementation": implementation})
    names = swap_class(model, nn.LayerNorm, LAYERS[implementation], lambda module: fits(module, implementation))
    left = _left_alone(model)
    if left:
        warnings.warn(NoEffectWarning(f"left alone, for {_unfit(implementation)}: {', '.join(left)}"), stacklevel=2)
    elif not _of_class(model, LAYERS[implementation]):
        warnings.warn(NoEffectWarning("no torch.nn.LayerNorm was found in the model"), stacklevel=2)
    return names


def _check(implementation: str) -> None:
    if implementation not in LAYERS:
        raise ValueError(f"implementation must be one of {', '.join(LAYERS)}, not {implementation!r}")


def _requirements(implementation: Implementation, context: Context) -> Iterable[Requirement]:
    """What a fused kernel needs; torch's own runs anywhere."""
    if implementation == "triton":
        yield needs_cuda(context, "Liger's Triton kernel", (7, 0))
        yield needs_package("liger_kernel", "composer_speedups[liger]")
    if implementation == "apex":
        yield needs_cuda(context, "Apex's kernel", (7, 0))
        yield Requirement(
            all(importlib.util.find_spec(module) for module in ("apex", "fused_layer_norm_cuda")),
            "Apex is not installed with its CUDA extensions",
            "build it so from the repository NVIDIA/apex on GitHub; the index's package apex is another project",
        )


def _any_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _of_class(model: nn.Module, cls: type[nn.Module]) -> list[nn.Module]:
    return [m for m in model.modules() if type(m) is cls]


def _left_alone(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.LayerNorm]


def _unfit(implementation: Implementation) -> str:
    return f"{implementation} wants a weight, a bias{' and one dimension' if implementation == 'triton' else ''}"


class FastLayerNorm(Technique):
    """LayerNorm in the autocast dtype, so that the residual stream stays in it too.

    Args:
        implementation: ``"low_precision"`` (default): torch's kernel on 16-bit values. ``"triton"``: Liger's
            kernel. ``"apex"``: NVIDIA Apex's. The latter two also run without mixed precision, in float32.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: Another implementation.
        TechniqueError: At INIT, without mixed precision (``low_precision``), GPU or package (the others), or
            without a LayerNorm that the kernel can take over.
    """

    name = "fast_layernorm"
    stage = Stage.SURGERY

    def __init__(
        self,
        implementation: Literal["low_precision", "triton", "apex"] = "low_precision",
        *,
        on_unavailable: OnUnavailable = "stop",
    ) -> None:
        super().__init__(on_unavailable=on_unavailable)
        _check(implementation)
        self.implementation: Implementation = implementation
        self._outputs = Outputs()
        self._count = 0

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if self.implementation == "low_precision":
            yield needs_autocast(context, "low-precision LayerNorm")
        yield from _requirements(self.implementation, context)

    def engage(self, state: State) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)  # said as an error or as evidence below
            try:
                apply_fast_layernorm(state.model, state.optimizers, self.implementation)
            except ValueError as error:
                raise TechniqueError(self.name, str(error), "take it out for this model") from error
        modules, left = self._modules(state), _left_alone(state.model)
        if not modules:
            reason = f" that fits: {_unfit(self.implementation)}" if left else ""
            raise TechniqueError(self.name, f"the model has no torch.nn.LayerNorm{reason}", "take it out")
        self._count = len(modules)
        evidence: dict[str, Any] = {"modules": len(modules), "implementation": self.implementation}
        return evidence | ({"left_alone": left} if left else {})

    def _modules(self, state: State) -> list[nn.Module]:
        return _of_class(state.model, LAYERS[self.implementation])

    def observe(self, event: Event, state: State) -> None:
        if event == Event.BEFORE_FORWARD and not is_compiled(state.model):  # hooks would change its graph
            self._outputs.watch(self._modules(state))
        elif event == Event.AFTER_FORWARD:
            self._outputs.stop()

    def close(self) -> None:
        self._outputs.stop()  # a forward pass that raised left the hooks

    def verify(self, state: State) -> dict[str, Any]:
        modules, outputs, seen_in = self._modules(state), self._outputs, "forward pass"
        if len(modules) < self._count:
            raise self.not_engaged(
                f"{self._count - len(modules)} of {self._count} modules are another class again", "leave it after INIT"
            )
        if not outputs.dtypes or not outputs.functions:  # compiled, or recomputed without gradients
            outputs, seen_in = self._probe(modules[0], state), "probe"
            if self.implementation == "triton" and is_compiled(state.model) and in_compiled_graphs():
                seen_in = "compiled graph"
        other = [name for name in outputs.functions if not is_of(self.implementation, name)]
        if other:
            raise self.not_engaged(f"its outputs came from {', '.join(other)}", "take it out for this model")
        if self.implementation == "low_precision" and "float32" in outputs.dtypes:
            raise self.not_engaged("its output is still float32", "keep mixed precision on")
        return {
            "output_dtype": ", ".join(sorted(outputs.dtypes)),
            "function": ", ".join(sorted(outputs.functions)),
            "function_seen_in": seen_in,
        }

    def _probe(self, module: nn.Module, state: State) -> Outputs:
        """What one of the modules gives for a sample, outside the model and its compiled code."""
        assert isinstance(module, nn.LayerNorm)
        device, outputs = device_of(state), Outputs()
        sample = torch.ones(2, *module.normalized_shape, device=device, requires_grad=True)
        autocast = device.type == "cpu" and self.implementation == "low_precision"  # there, mixed_precision's own
        cpu_autocast = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with torch.enable_grad(), get_precision_context(state.precision, state.precision_config), cpu_autocast:
            outputs.see(module.forward(sample))
        return outputs
