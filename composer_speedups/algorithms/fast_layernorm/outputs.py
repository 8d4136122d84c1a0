"""Record the dtypes of LayerNorms' outputs, and the autograd functions that computed them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor, nn

from composer_speedups.algorithms.fast_layernorm.layers import Implementation

# Substrings of the autograd functions' names, in lower case and without underscores. torch's is NativeLayerNorm.
_MARKS = {"low_precision": "nativelayernorm", "triton": "ligerlayernorm", "apex": "fusedlayernorm"}


class Outputs:
    """Counts the dtypes and the autograd functions of watched modules' outputs.

    Attributes:
        dtypes: Number of outputs of each dtype: ``float32``, ``bfloat16`` …
        functions: Number of outputs of each autograd function: ``LigerLayerNormFunction``, ``NativeLayerNorm`` …
            Outputs without a gradient do not show the function and are not counted.
    """

    def __init__(self) -> None:
        self.dtypes: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self._hooks = ExitStack()

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Record the outputs of ``modules`` until :meth:`stop` or the next :meth:`watch`."""
        self.stop()
        for module in modules:
            self._hooks.callback(module.register_forward_hook(lambda _m, _i, output: self.record(output)).remove)

    def record(self, output: Tensor) -> None:
        self.dtypes[str(output.dtype).removeprefix("torch.")] += 1
        if output.grad_fn is not None:
            self.functions[output.grad_fn.name().rstrip("0123456789").removesuffix("Backward")] += 1

    def stop(self) -> None:
        self._hooks.close()


def is_of(implementation: Implementation, function: str) -> bool:
    """Return whether an autograd function belongs to an implementation."""
    return _MARKS[implementation] in function.replace("_", "").lower()


def in_compiled_graphs() -> bool:
    """Return whether a graph that torch.compile captured in this process calls Liger's LayerNorm kernel.

    Compiled code does not run hooks, but dynamo keeps the Triton kernels of its graphs in a table.
    """
    table = sys.modules.get("torch._higher_order_ops.triton_kernel_wrap")
    kernels = getattr(getattr(table, "kernel_side_table", None), "id_to_kernel", {}).values()
    functions = [getattr(kernel, "fn", kernel) for kernel in kernels]
    return any(f.__module__.startswith("liger_kernel.") and "layer_norm_forward" in f.__name__ for f in functions)
