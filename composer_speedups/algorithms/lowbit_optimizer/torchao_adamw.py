"""torchao's low-bit AdamW, in which selected parameters keep full-precision state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from composer_speedups.core.operator_recorder import counted_apart

Bits = Literal[8, 4, "fp8"]


class _SelectiveState:
    """A mixin for torchao's optimizers, to select parameters with full-precision state and whether to compile."""

    full_precision: frozenset[int]  # ids of parameters
    min_size: int
    compiled: bool | None  # None: on a GPU only
    block_size: int
    _subclass_zeros: Callable[..., Tensor]
    param_groups: list[dict[str, Any]]

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Create a state tensor; overrides torchao's method, which has a fixed minimum size of 4096 values."""
        if id(p) in self.full_precision or p.numel() < self.min_size or p.numel() % self.block_size:
            return torch.zeros_like(p)
        return self._subclass_zeros(p, signed, self.block_size)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure outside of the step's compilation settings, which must not affect the model, then step."""
        loss = None if closure is None else closure()
        from torchao.optim.adam import _AdamBase  # without torch's step hooks, which run around this method

        compiled = self.compiled
        if compiled is None:
            compiled = any(p.device.type == "cuda" for g in self.param_groups for p in g["params"])
        with counted_apart(), torch.compiler.set_stance("default" if compiled else "force_eager"):
            _AdamBase.step(self)
        return loss


@cache
def _class_of(bits: Bits) -> type[torch.optim.Optimizer]:
    from torchao import optim

    base = {8: optim.AdamW8bit, 4: optim.AdamW4bit, "fp8": optim.AdamWFp8}[bits]
    name = f"Torchao{base.__name__}"
    return type(name, (_SelectiveState, base), {"__module__": __name__, "__qualname__": name})


def lowbit_adamw(
    groups: Iterable[dict[str, Any]],
    bits: Bits = 8,
    *,
    full_precision: Iterable[Tensor] = (),
    min_size: int = 4096,
    compiled: bool | None = None,
) -> torch.optim.Optimizer:
    """Create torchao's AdamW8bit, AdamW4bit or AdamWFp8 with parameter ``groups``.

    The state of ``full_precision`` has the parameter's dtype; for the other arguments, see
    :func:`.apply_lowbit_optimizer`.
    """
    kind: Any = _class_of(bits)
    optimizer = kind(groups)
    optimizer.full_precision = frozenset(map(id, full_precision))
    optimizer.min_size, optimizer.compiled = min_size, compiled
    return optimizer
