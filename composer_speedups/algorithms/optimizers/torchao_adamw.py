"""torchao's low-bit AdamW, in which selected parameters keep full-precision state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from composer_speedups.core.compile_counts import counted_apart

Bits = Literal[8, 4, "fp8"]


@cache
def _class_of(bits: Bits) -> Any:
    from torchao import optim
    from torchao.optim.adam import _AdamBase  # has no step hooks of torch, which run around the step below

    base: Any = {8: optim.AdamW8bit, 4: optim.AdamW4bit, "fp8": optim.AdamWFp8}[bits]

    def _new_buffer(self: Any, p: Tensor, signed: bool) -> Tensor:
        """Create a state tensor; torchao's method has a fixed minimum size of 4096 values."""
        if id(p) in self.full_precision or p.numel() < self.min_size or p.numel() % self.block_size:
            return torch.zeros_like(p)
        return self._subclass_zeros(p, signed, self.block_size)  # type: ignore[no-any-return]

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure outside of the step's compilation settings, which must not affect the model, then step.
        The step is compiled on a GPU only."""
        loss = None if closure is None else closure()
        compiled = any(p.is_cuda for group in self.param_groups for p in group["params"])
        with counted_apart(), torch.compiler.set_stance("default" if compiled else "force_eager"):
            _AdamBase.step(self)
        return loss

    name = f"Torchao{base.__name__}"
    members = {"__module__": __name__, "__qualname__": name, "_new_buffer": _new_buffer, "step": step}
    return type(name, (base,), members)


def lowbit_adamw(
    groups: list[dict[str, Any]],
    defaults: dict[str, Any],
    bits: Bits,
    *,
    full_precision: Iterable[Tensor],
    min_size: int,
) -> Optimizer:
    """Create torchao's AdamW8bit, AdamW4bit or AdamWFp8.

    The parameters in ``full_precision``, those with fewer than ``min_size`` values, and those whose number of values is
    not a multiple of the block size (256, or 128 for 4 bits) have state of the parameter's dtype. Embeddings need it:
    with 8-bit and fp8 state, rows without a gradient in a batch make large jumps.
    """
    optimizer = _class_of(bits)(groups, **defaults)
    optimizer.full_precision, optimizer.min_size = frozenset(map(id, full_precision)), min_size
    return optimizer  # type: ignore[no-any-return]
