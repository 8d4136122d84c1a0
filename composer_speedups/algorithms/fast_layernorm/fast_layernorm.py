"""The fast LayerNorm technique: LayerNorm in the autocast dtype, with torch's, Liger's or Apex's kernel."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import torch
from composer.core import State, get_precision_context
from pydantic import Field
from torch import Tensor, nn

from composer_speedups.algorithms.fast_layernorm import functional
from composer_speedups.algorithms.fast_layernorm.functional import (
    apply_fast_layernorm,
    modules_of_class,
    supported_modules,
    unchanged_layernorms,
)
from composer_speedups.algorithms.fast_layernorm.layers import LAYERS
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.requirements import Context, Requirement, needs_autocast
from composer_speedups.core.technique import Stage, Technique, Variant
from composer_speedups.core.trainer_state import device_of, is_compiled
from composer_speedups.surgery.already_applied import NoEffectWarning

# Substrings of the autograd functions' names, in lower case and without underscores. torch's is NativeLayerNorm.
_MARKS = {"low_precision": "nativelayernorm", "triton": "ligerlayernorm", "apex": "fusedlayernorm"}


class FastLayerNorm(Technique):
    """Computes LayerNorm in the autocast dtype, so the residual stream has that dtype, too.

    Raises:
        TechniqueError: At INIT, without mixed precision (``low_precision``), without a GPU or the package (other
            implementations), or without a LayerNorm that the kernel supports.
    """

    name = "fast_layernorm"
    stage = Stage.SURGERY
    exactness = "lower_precision"
    gain = 1.16
    trials = (Variant({"implementation": "low_precision"}), Variant({"implementation": "triton"}))

    implementation: Literal["low_precision", "triton", "apex"] = Field("low_precision")
    """low_precision is torch's kernel with 16-bit values, triton is Liger's kernel, apex is NVIDIA Apex's. The latter
    two also run without mixed precision, in float32."""

    def reset(self) -> None:
        super().reset()
        self._outputs = _Outputs()
        self._count = 0

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if self.implementation == "low_precision":
            yield needs_autocast(context, "low-precision LayerNorm")
        yield from functional.requirements_of(self.implementation, context)

    def engage(self, state: State) -> dict[str, Any]:
        with warnings.catch_warnings(), self.refusals():
            warnings.simplefilter("ignore", NoEffectWarning)  # reported as an error or as evidence below
            apply_fast_layernorm(state.model, state.optimizers, self.implementation)
        modules, unchanged = self._modules(state), unchanged_layernorms(state.model)
        if not modules:
            reason = f" that is supported: {supported_modules(self.implementation)}" if unchanged else ""
            raise TechniqueError(self.name, f"the model has no torch.nn.LayerNorm{reason}", "remove it")
        self._count = len(modules)
        evidence: dict[str, Any] = {"modules": len(modules), "implementation": self.implementation}
        return evidence | ({"left_alone": unchanged} if unchanged else {})

    def _modules(self, state: State) -> list[nn.Module]:
        return modules_of_class(state.model, LAYERS[self.implementation])

    def watch(self, state: State) -> None:
        if not is_compiled(state.model):  # hooks would change the compiled graph
            for module in self._modules(state):
                hook = module.register_forward_hook(lambda _module, _inputs, output: self._outputs.record(output))
                self.watching.callback(hook.remove)

    def verify(self, state: State) -> dict[str, Any]:
        modules, outputs, seen_in = self._modules(state), self._outputs, "forward pass"
        if len(modules) < self._count:
            raise self.not_engaged(
                f"{self._count - len(modules)} of {self._count} modules have another class again",
                "do not change them after INIT",
            )
        if not outputs.dtypes or not outputs.functions:  # compiled, or recomputed without gradients
            outputs, seen_in = self._probe(modules[0], state), "probe"
            if self.implementation == "triton" and is_compiled(state.model) and in_compiled_graphs():
                seen_in = "compiled graph"
        mark = _MARKS[self.implementation]
        other = [name for name in outputs.functions if mark not in name.replace("_", "").lower()]
        if other:
            raise self.not_engaged(f"its outputs came from {', '.join(other)}", "remove it for this model")
        if self.implementation == "low_precision" and "float32" in outputs.dtypes:
            raise self.not_engaged("its output is still float32", "keep mixed precision on")
        return {
            "output_dtype": ", ".join(sorted(outputs.dtypes)),
            "function": ", ".join(sorted(outputs.functions)),
            "function_seen_in": seen_in,
        }

    def _probe(self, module: nn.Module, state: State) -> _Outputs:
        """Run one of the modules on a sample, outside of the model and its compiled code."""
        assert isinstance(module, nn.LayerNorm)
        device, outputs = device_of(state), _Outputs()
        sample = torch.ones(2, *module.normalized_shape, device=device, requires_grad=True)
        # On a CPU, mixed_precision uses its own autocast, not the Trainer's precision.
        autocast = device.type == "cpu" and self.implementation == "low_precision"
        cpu_autocast = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with torch.enable_grad(), get_precision_context(state.precision, state.precision_config), cpu_autocast:
            outputs.record(module.forward(sample))
        return outputs


class _Outputs:
    """Counts the dtypes of modules' outputs, and the autograd functions that computed them.

    Outputs without a gradient do not show the function and are not counted.
    """

    def __init__(self) -> None:
        self.dtypes: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def record(self, output: Tensor) -> None:
        self.dtypes[str(output.dtype).removeprefix("torch.")] += 1
        if output.grad_fn is not None:
            self.functions[output.grad_fn.name().rstrip("0123456789").removesuffix("Backward")] += 1


def in_compiled_graphs() -> bool:
    """Return whether a graph that torch.compile captured in this process calls Liger's LayerNorm kernel.

    Compiled code does not run hooks, but dynamo keeps the Triton kernels of its graphs in a table.
    """
    table = sys.modules.get("torch._higher_order_ops.triton_kernel_wrap")
    kernels = getattr(getattr(table, "kernel_side_table", None), "id_to_kernel", {}).values()
    functions = [getattr(kernel, "fn", kernel) for kernel in kernels]
    return any(f.__module__.startswith("liger_kernel.") and "layer_norm_forward" in f.__name__ for f in functions)
