"""What LayerNorms gave in a forward pass: the dtype, and the autograd function that made it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor, nn

from composer_speedups.algorithms.fast_layernorm.layers import Implementation

# In the names of the autograd functions, lower case and without underscores. torch's own is NativeLayerNorm.
_MARKS = {"low_precision": "nativelayernorm", "triton": "ligerlayernorm", "apex": "fusedlayernorm"}


class Outputs:
    """Counts dtypes and autograd functions of the outputs of the modules watched.

    Attributes:
        dtypes: ``float32``, ``bfloat16`` … → outputs of it.
        functions: ``LigerLayerNormFunction``, ``NativeLayerNorm`` … → outputs made by it; an output without
            a gradient tells nothing of what made it and is not counted.
    """

    def __init__(self) -> None:
        self.dtypes: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self._hooks = ExitStack()

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Look at the outputs of ``modules`` until :meth:`stop`, or until others are to be watched."""
        self.stop()
        for module in modules:
            self._hooks.callback(module.register_forward_hook(lambda _m, _i, output: self.see(output)).remove)

    def see(self, output: Tensor) -> None:
        self.dtypes[str(output.dtype).removeprefix("torch.")] += 1
        if output.grad_fn is not None:
            self.functions[output.grad_fn.name().rstrip("0123456789").removesuffix("Backward")] += 1

    def stop(self) -> None:
        self._hooks.close()


def is_of(implementation: Implementation, function: str) -> bool:
    """Whether an autograd function is that of an implementation."""
    return _MARKS[implementation] in function.replace("_", "").lower()


def in_compiled_graphs() -> bool:
    """Whether a graph that torch.compile captured in this process calls Liger's LayerNorm kernel.

    Compiled code runs no hooks; dynamo keeps the Triton kernels of its graphs in a table.
    """
    table = sys.modules.get("torch._higher_order_ops.triton_kernel_wrap")
    kernels = getattr(getattr(table, "kernel_side_table", None), "id_to_kernel", {}).values()
    functions = [getattr(kernel, "fn", kernel) for kernel in kernels]
    return any(f.__module__.startswith("liger_kernel.") and "layer_norm_forward" in f.__name__ for f in functions)
