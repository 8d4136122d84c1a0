"""LoRA adapters of a fused layer: added to the weights before the matmuls, and their gradients.

An adapter changes its Linear's weight W to W + s · B · A. That sum is computed once per forward pass, in the weight's
own precision and before it is rounded to the matmuls' dtype, so adapters cost the matmuls nothing. Updates that are
smaller than a rounding step of the weight still count on average, as those of float32 weights in mixed precision do.
Only an adapter with dropout, whose input differs from its Linear's, is a product of its own.

In place of a weight's gradient, there are four narrow products for those of A and B: z = x · Aᵀ in the forward pass,
and dz = s · dy · B, dA = dzᵀ · x and dB = s · dyᵀ · z in the backward pass. They take as long as reading x and dy.
Hence one kernel computes both products of dy, and GELU's kernels compute those of its input and result; see
:mod:`~composer_speedups.kernels.narrow`.

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
from composer_speedups.kernels.float8 import Float8
from composer_speedups.kernels.gelu import gelu_backward, gelu_forward
from composer_speedups.kernels.narrow import MAX_WIDTH, gelu_backward_narrow, gelu_narrow, narrow_products

__all__ = ["Branch", "LayerAdapters", "gelu_and_z", "gelu_gradients"]

_MATMULS = (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6))  # the Linears of qkv, out, up and down


class LayerAdapters:
    """The adapters of a layer's six Linears, in the order of :class:`LayerModules`; None for a Linear without one.

    ``differentiate`` is False in a forward pass without gradients.
    """

    def __init__(self, linears: Sequence[Adapter | None], *, differentiate: bool = True) -> None:
        self.linears, self.differentiate = list(linears), differentiate

    @classmethod
    def of(cls, modules: LayerModules) -> LayerAdapters:
        """Return the active adapters of a layer's modules, which the kernels support."""
        linears = [adapter_of(linear) for linear in modules.linears()]
        return cls(linears, differentiate=torch.is_grad_enabled())  # gradients are disabled in a function's forward

    @property
    def drop(self) -> bool:
        """Whether an adapter has dropout."""
        return any(adapter is not None and adapter.dropout > 0 for adapter in self.linears)

    def ranks(self) -> tuple[int, ...]:
        """Return the sums of the ranks of each matmul's adapters, for which kernels are compiled; empty without any.

        With dropout, the matmul's adapters run in other kernels.
        """
        ranks = tuple(sum(len(a.a) for a in self.linears[some] if a is not None) for some in _MATMULS)
        return ranks if any(ranks) and not self.drop else ()

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

    def branches(self, seeds: Sequence[Tensor], dtype: torch.dtype, wanted: Sequence[bool]) -> list[Branch]:
        """Return the branches of qkv, out, up and down.

        Args:
            seeds: One per Linear for the dropout of its adapter; may be empty if no adapter has dropout.
            dtype: Dtype of the matmuls.
            wanted: Whether the gradient of each of :meth:`tensors` is wanted, if any is.
        """
        wants = iter([want and self.differentiate for want in wanted])
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

    Attributes:
        a_RI: A of each adapter, one below the other.
        b_OR: s · B of each adapter, block by block.
    """

    a_RI: Tensor
    b_OR: Tensor

    def __init__(
        self, linears: Sequence[tuple[Adapter | None, Tensor | None, tuple[bool, bool]]], dtype: torch.dtype
    ) -> None:
        self._held = [_Held(a, seed, wanted, i) for i, (a, seed, wanted) in enumerate(linears) if a is not None]
        self._outputs: list[slice] = []  # of each adapter's Linear, in the matmul's result
        self._ranks: list[slice] = []
        # Without a gradient or dropout, there is nothing to compute: the adapter is part of the weight.
        self.active = any(any(held.wanted) or held.seed is not None for held in self._held)
        if not self.active:
            return
        rank, first = 0, self._held[0].adapter
        for held in self._held:
            width, own = held.adapter.b.shape
            self._outputs.append(slice(held.position * width, (held.position + 1) * width))
            self._ranks.append(slice(rank, rank + own))
            rank += own
        self.a_RI = first.a.new_empty(rank, first.a.shape[1], dtype=dtype)
        self.b_OR = first.b.new_zeros(len(linears) * len(first.b), rank, dtype=dtype)
        blocks = [self.b_OR[at] for at in zip(self._outputs, self._ranks, strict=True)]
        torch._foreach_copy_(
            [*(self.a_RI[ranks] for ranks in self._ranks), *blocks],
            [*(held.adapter.a for held in self._held), *(held.adapter.b * held.adapter.scale for held in self._held)],
        )

    @property
    def drops(self) -> bool:
        """Whether an adapter has dropout."""
        return any(held.seed is not None for held in self._held)

    @property
    def is_simple(self) -> bool:
        """Whether the kernels for GELU's neighbours support it: few ranks, no dropout; also if there is no adapter."""
        return not self.active or (not self.drops and len(self.a_RI) <= MAX_WIDTH)

    def _each(self) -> Iterator[tuple[_Held, slice, slice]]:
        return zip(self._held, self._outputs, self._ranks, strict=True)

    def forward(self, x_TI: Tensor, y_TO: Tensor) -> Tensor | None:
        """Return z = A · dropout(x) (T, R), which the backward pass needs; None if it does not.

        The results of adapters with dropout are added to the matmul's result, in place.
        """
        if not self.active:
            return None
        if not self.drops:
            return torch.mm(x_TI, self.a_RI.t())
        parts = []
        for held, outputs, ranks in self._each():
            parts.append(torch.mm(held.drop(x_TI), self.a_RI[ranks].t()))
            if held.seed is not None:
                y_TO[:, outputs].addmm_(parts[-1], self.b_OR[outputs, ranks].t())
        return torch.cat(parts, 1)

    def from_gelu(self, x_TF: Tensor, y_TO: Tensor) -> Tensor | None:
        """Do as :meth:`forward` for the input GELU(x), which is only written to memory for adapters with dropout."""
        if self.active and self.is_simple:
            return gelu_narrow(x_TF, self.a_RI.t().contiguous(), write=False)[1]
        return self.forward(gelu_forward(x_TF), y_TO) if self.active else None

    def through(self, dy_TO: Tensor, z_TR: Tensor | None, dx_TI: Tensor | None) -> Gradients | None:
        """Return the gradient of z, and that of B, from the gradient of the matmul's result.

        The share of adapters with dropout is added to the gradient of the matmul's input, in place, if that is given.
        The share of the others comes from the weight that they are part of.
        """
        if z_TR is None:
            return None
        dz_TR, d_b = _both_products(dy_TO, z_TR, self.b_OR)
        for held, _, ranks in self._each():
            if held.seed is not None and dx_TI is not None:
                held.drop(torch.mm(dz_TR[:, ranks], self.a_RI[ranks]), add_to=dx_TI)
        return Gradients(dz_TR, d_b)

    def finish(
        self, x_TI: Tensor | None, gradients: Gradients | None, d_a: Tensor | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of A and B of each adapter, in the parameters' dtypes; None for those not wanted.

        Args:
            x_TI: The matmul's input; None if ``d_a`` is given.
            gradients: From :meth:`through`.
            d_a: The gradient of all A (R, I), if a kernel has computed it.
        """
        if gradients is None or not any(any(held.wanted) for held in self._held):
            return [None] * (2 * len(self._held))
        if d_a is None:
            assert x_TI is not None
            if self.drops:
                each = [(held.drop(x_TI), gradients.z_TR[:, ranks]) for held, _, ranks in self._each()]
                d_a = torch.cat([_product(dz_TR, kept_TI) for kept_TI, dz_TR in each])
            else:
                d_a = _gradient(x_TI, gradients.z_TR)
        found: list[Tensor | None] = []
        for held, outputs, ranks in self._each():
            d_b = (gradients.b_RO[ranks, outputs].t() * held.adapter.scale).contiguous()
            found.append(d_a[ranks].to(held.adapter.a.dtype) if held.wanted[0] else None)
            found.append(d_b.to(held.adapter.b.dtype) if held.wanted[1] else None)
        return found


class Gradients(NamedTuple):
    """The gradients of a branch's z (T, R), and of B without the scale, transposed (R, O), float32."""

    z_TR: Tensor
    b_RO: Tensor


def gelu_and_z(branch: Branch, x_TF: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute GELU(x) (T, F), and z of a branch that reads it, if the kernel supports the branch."""
    if branch.active and branch.is_simple:
        result, z_TR = gelu_narrow(x_TF, branch.a_RI.t().contiguous())
        assert result is not None
        return result, z_TR
    return gelu_forward(x_TF), None


class GeluGradients(NamedTuple):
    """What :func:`gelu_gradients` computes; None for what is not wanted, or for what is left to the caller (``up``)."""

    x_TF: Tensor
    partial_sums: Tensor | None
    down_weight: Tensor | None
    up: Gradients | None
    down: list[Tensor | None]


def gelu_gradients(
    grad_TF: Tensor,
    x_TF: Tensor,
    d_down_TH: Tensor,
    on_up: Branch,
    on_down: Branch,
    z_up: Tensor | None,
    z_down: Tensor | None,
    wanted: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    operand: Float8 | None = None,
) -> GeluGradients:
    """Compute the gradient of GELU's input, and the gradients of its neighbours' adapters and of the down weight.

    Args:
        grad_TF: Gradient of GELU's result; overwritten.
        x_TF: GELU's input.
        d_down_TH: Gradient of the down matmul's result.
        on_up, on_down, z_up, z_down: The branches of the matmuls before and after GELU, and their z.
        wanted, dtypes: Of the layer's parameters.
        operand: Also receives the gradient of x in 8 bits.
    """
    down = on_down.through(d_down_TH, z_down, grad_TF)
    simple = (on_up.active or on_down.active) and on_up.is_simple and on_down.is_simple
    if simple and not any(wanted[10:13]):  # nothing else needs GELU's result or the sums over tokens
        narrow = (z_up, on_up.b_OR if on_up.active else None, None if down is None else down.z_TR)
        d_x, dz_up, d_b_up, d_a_down = gelu_backward_narrow(grad_TF, x_TF, *narrow, operand)
        up = None if dz_up is None or d_b_up is None else Gradients(dz_up, d_b_up)
        return GeluGradients(d_x, None, None, up, on_down.finish(None, down, d_a_down))
    d_x, activated, sums = gelu_backward(grad_TF, x_TF, operand)
    d_down_w = weight_gradient(d_down_TH, activated, dtypes[12]) if wanted[12] else None
    return GeluGradients(d_x, sums, d_down_w, None, on_down.finish(activated, down))


class _Held(NamedTuple):
    """An adapter of a branch. The seed is None without dropout."""

    adapter: Adapter
    seed: Tensor | None
    wanted: tuple[bool, bool]
    position: int  # of its Linear among the matmul's

    def drop(self, x_TC: Tensor, add_to: Tensor | None = None) -> Tensor:
        """The adapter's dropout of a tensor; with ``add_to``, added to that one in place."""
        return x_TC if self.seed is None else dropped(x_TC, self.adapter.dropout, self.seed, add_to)


def _both_products(dy_TO: Tensor, z_TR: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
    """Return dy · b (T, R), and zᵀ · dy (R, O), float32."""
    if z_TR.shape[1] > MAX_WIDTH:
        return torch.mm(dy_TO, b_OR), _product(z_TR, dy_TO)
    product, gradient = narrow_products(dy_TO, z_TR, b_OR)
    assert product is not None
    assert gradient is not None
    return product, gradient


def _gradient(x_TI: Tensor, dz_TR: Tensor) -> Tensor:
    """Return dzᵀ · x (R, I), float32."""
    if dz_TR.shape[1] > MAX_WIDTH:
        return _product(dz_TR, x_TI)
    gradient = narrow_products(x_TI, dz_TR)[1]
    assert gradient is not None
    return gradient


def _product(grad_TO: Tensor, x_TI: Tensor) -> Tensor:
    return weight_gradient(grad_TO, x_TI, torch.float32)
