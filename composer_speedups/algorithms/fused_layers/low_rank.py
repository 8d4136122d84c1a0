"""LoRA adapters of a fused layer: added to the weights before the matmuls, and their gradients.

An adapter changes its Linear's weight W to W + s · B · A. That sum is computed once per forward pass, in the weight's
own precision and before it is rounded to the matmuls' dtype, so adapters cost the matmuls nothing. Updates that are
smaller than a rounding step of the weight still count on average, as those of float32 weights in mixed precision do.
Only an adapter with dropout, whose input differs from its Linear's, is a product of its own.

In the backward pass, the gradients of A and B are four narrow products, in place of the weight's gradient:
z = x · Aᵀ and dz = s · dy · B, then dA = dzᵀ · x and dB = s · dyᵀ · z.

Shapes: T tokens, I inputs and O outputs of a matmul, R rank, or the sum of the ranks of a matmul's adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composer_speedups.algorithms.fused_layers.products import WEIGHTS, weight_gradient
from composer_speedups.core.adapters import Adapter, adapter_of, merged_weight
from composer_speedups.families.family import LayerModules
from composer_speedups.kernels.dropout import dropped

__all__ = ["Branch", "LayerAdapters"]

_MATMULS = (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6))  # the Linears of qkv, out, up and down


class LayerAdapters:
    """The adapters of a layer's six Linears, in the order of :class:`LayerModules`; None for a Linear without one."""

    def __init__(self, linears: Sequence[Adapter | None]) -> None:
        self.linears = list(linears)

    @classmethod
    def of(cls, modules: LayerModules) -> LayerAdapters:
        """Return the active adapters of a layer's modules, which the kernels support."""
        return cls([adapter_of(linear) for linear in modules.linears()])

    @property
    def drop(self) -> bool:
        """Whether an adapter has dropout."""
        return any(adapter is not None and adapter.dropout > 0 for adapter in self.linears)

    def tensors(self) -> list[Tensor]:
        """Return A and B of each adapter."""
        return [tensor for adapter in self.linears if adapter is not None for tensor in (adapter.a, adapter.b)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> LayerAdapters:
        """Return the same adapters with other tensors, in the order of :meth:`tensors`."""
        new = iter(tensors)
        return LayerAdapters([a if a is None else a._replace(a=next(new), b=next(new)) for a in self.linears])

    def merged(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the layer's parameters, with the merged weight of each Linear that has one."""
        merged = [*parameters]
        for i, adapter in zip(WEIGHTS, self.linears, strict=True):
            merged[i] = merged_weight(parameters[i], adapter)
        return merged

    def read_input(self, wanted: Sequence[bool]) -> bool:
        """Whether gradients of the adapters of query, key and value are wanted, which the layer's input is for.

        ``wanted`` says so for each of :meth:`tensors`.
        """
        return any(wanted[: len(LayerAdapters(self.linears[:3]).tensors())])

    def with_dropout(self) -> LayerAdapters:
        """Return only the adapters with dropout, which are not part of the merged weights."""
        return LayerAdapters([a if a is not None and a.dropout > 0 else None for a in self.linears])

    def branches(
        self, seeds: Sequence[Tensor], dtype: torch.dtype, wanted: Sequence[bool] | None = None
    ) -> list[Branch]:
        """Return the branches of qkv, out, up and down.

        Args:
            seeds: One per Linear for the dropout of its adapter; may be empty if no adapter has dropout.
            dtype: Dtype of the matmuls.
            wanted: Whether the gradient of each of :meth:`tensors` is wanted; None for no gradients.
        """
        wants = iter([False] * len(self.tensors()) if wanted is None else wanted)
        flags = [(False, False) if adapter is None else (next(wants), next(wants)) for adapter in self.linears]
        own = [None if a is None or a.dropout == 0 else seeds[i] for i, a in enumerate(self.linears)]
        each = list(zip(self.linears, own, flags, strict=True))
        return [Branch(each[some], dtype) for some in _MATMULS]


class Branch:
    """The adapters of one matmul; without any, every method does nothing.

    Args:
        linears: For each Linear of the matmul, its adapter, the seed of the adapter's dropout (None without dropout),
            and whether the gradients of A and of B are wanted.
        dtype: Dtype of the matmul.
    """

    def __init__(
        self, linears: Sequence[tuple[Adapter | None, Tensor | None, tuple[bool, bool]]], dtype: torch.dtype
    ) -> None:
        self._held = [_Held(a, seed, wanted, i) for i, (a, seed, wanted) in enumerate(linears) if a is not None]
        self._outputs: list[slice] = []  # of each adapter's Linear, in the matmul's result
        self._ranks: list[slice] = []
        if not self._held:
            return
        rank, first = 0, self._held[0].adapter
        for held in self._held:
            width, own = held.adapter.b.shape
            self._outputs.append(slice(held.position * width, (held.position + 1) * width))
            self._ranks.append(slice(rank, rank + own))
            rank += own
        self._a_RI = first.a.new_empty(rank, first.a.shape[1], dtype=dtype)
        self._b_OR = first.b.new_zeros(len(linears) * len(first.b), rank, dtype=dtype)  # s · B, block by block
        blocks = [self._b_OR[at] for at in zip(self._outputs, self._ranks, strict=True)]
        torch._foreach_copy_(
            [*(self._a_RI[ranks] for ranks in self._ranks), *blocks],
            [*(held.adapter.a for held in self._held), *(held.adapter.b * held.adapter.scale for held in self._held)],
        )

    @property
    def wanted(self) -> bool:
        """Whether an adapter's gradient is wanted."""
        return any(any(held.wanted) for held in self._held)

    @property
    def drops(self) -> bool:
        """Whether an adapter has dropout."""
        return any(held.seed is not None for held in self._held)

    def _each(self) -> Iterator[tuple[_Held, slice, slice]]:
        return zip(self._held, self._outputs, self._ranks, strict=True)

    def add(self, x_TI: Tensor, y_TO: Tensor) -> Tensor:
        """Add the results of the adapters to the matmul's result, in place, and return it."""
        for held, outputs, ranks in self._each():
            z_TR = torch.mm(held.drop(x_TI), self._a_RI[ranks].t())
            y_TO[:, outputs].addmm_(z_TR, self._b_OR[outputs, ranks].t())
        return y_TO

    def between(self, dy_TO: Tensor, dx_TI: Tensor | None) -> Tensor | None:
        """Return the gradient dz (T, R) for that of the matmul's result; None if nothing needs it.

        The share of adapters with dropout is added to the gradient of the matmul's input, in place. The share of the
        others comes from the weight that they are part of.
        """
        if not self.wanted and (dx_TI is None or not self.drops):
            return None
        dz_TR = torch.mm(dy_TO, self._b_OR)
        for held, _, ranks in self._each():
            if held.seed is not None and dx_TI is not None:
                held.drop(torch.mm(dz_TR[:, ranks], self._a_RI[ranks]), add_to=dx_TI)
        return dz_TR

    def gradients(self, x_TI: Tensor | None, dy_TO: Tensor | None, dz_TR: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of A and B of each adapter, in the parameters' dtypes; None for those not wanted."""
        if x_TI is None or dy_TO is None or dz_TR is None or not self.wanted:
            return [None] * (2 * len(self._held))
        if self.drops:
            found = []
            for held, outputs, ranks in self._each():
                kept_TI = held.drop(x_TI)
                z_TR = torch.mm(kept_TI, self._a_RI[ranks].t())
                found.append((_product(dz_TR[:, ranks], kept_TI), _product(dy_TO[:, outputs], z_TR)))
        else:  # one product for all of the matmul's adapters reads its operands once
            z_TR = torch.mm(x_TI, self._a_RI.t())
            d_a, d_b = _product(dz_TR, x_TI), _product(dy_TO, z_TR)
            found = [(d_a[ranks], d_b[outputs, ranks]) for _, outputs, ranks in self._each()]
        gradients: list[Tensor | None] = []
        for held, (d_a, d_b) in zip(self._held, found, strict=True):
            gradients.append(d_a.to(held.adapter.a.dtype) if held.wanted[0] else None)
            gradients.append((d_b * held.adapter.scale).to(held.adapter.b.dtype) if held.wanted[1] else None)
        return gradients


class _Held(NamedTuple):
    """An adapter of a branch. The seed is None without dropout."""

    adapter: Adapter
    seed: Tensor | None
    wanted: tuple[bool, bool]
    position: int  # of its Linear among the matmul's

    def drop(self, x_TC: Tensor, add_to: Tensor | None = None) -> Tensor:
        """The adapter's dropout of a tensor; with ``add_to``, added to that one in place."""
        return x_TC if self.seed is None else dropped(x_TC, self.adapter.dropout, self.seed, add_to)


def _product(grad_TO: Tensor, x_TI: Tensor) -> Tensor:
    return weight_gradient(grad_TO, x_TI, torch.float32)
