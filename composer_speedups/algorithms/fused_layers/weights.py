"""The weights of a fused layer's matmuls, with LoRA adapters, and the gradients of both.

An adapter changes its Linear's weight W to W + s · B · A. That sum is computed once per forward pass, in float32 and
before it is rounded to the matmuls' dtype, so adapters cost the matmuls nothing. Updates that are smaller than a
rounding step of the weight still count on average, as those of float32 weights in mixed precision do. Only an adapter
with dropout, whose input differs from its Linear's, is a product of its own.

In place of a weight's gradient, there are four narrow products for those of A and B: z = s · x · Aᵀ in the forward
pass, and dz = dy · B, dA = s · dzᵀ · x and dB = dyᵀ · z in the backward pass. They take as long as reading x and dy.
Hence one kernel computes both products of dy, and GELU's kernels compute those of its input and result; see
:mod:`~composer_speedups.kernels.narrow`.

Shapes: T tokens, I inputs and O outputs of a matmul, R rank, or the sum of the ranks of a matmul's adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups.core.stock import Adapter, adapter_of
from composer_speedups.families.family import LayerModules
from composer_speedups.kernels.casts import cast_together, merged_weights
from composer_speedups.kernels.dropout import dropped
from composer_speedups.kernels.float8 import Float8
from composer_speedups.kernels.gelu import gelu_backward, gelu_forward
from composer_speedups.kernels.gelu_products import gelu_product_backward
from composer_speedups.kernels.narrow import (
    MAX_WIDTH,
    adapter_gradients,
    gelu_backward_narrow,
    gelu_narrow,
    narrow_gradient,
)
from composer_speedups.kernels.sums import MAX_TENSORS, partial_sums, totals

PARAMETERS = 16  # of a layer: weights and biases of six Linears and two LayerNorms
WEIGHTS = (0, 2, 4, 6, 10, 12)  # of query, key, value, out, up, down; the gradients of others are sums over tokens
_MATMULS = (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6))  # the Linears of qkv, out, up and down


class LayerAdapters:
    """The active adapters of a layer's six Linears; None for a Linear without one."""

    def __init__(self, linears: Sequence[Adapter | None]) -> None:
        self.linears = list(linears)
        self._differentiate = torch.is_grad_enabled()  # gradients are disabled in a function's forward

    @classmethod
    def of(cls, modules: LayerModules) -> LayerAdapters:
        return cls([adapter_of(linear) for linear in modules.linears()])

    @property
    def drop(self) -> bool:
        """Whether an adapter has dropout."""
        return any(adapter is not None and adapter.dropout > 0 for adapter in self.linears)

    def ranks(self) -> tuple[int, ...]:
        """The rank of each Linear's adapter, 0 without one, for which kernels are compiled; empty for other kernels."""
        ranks = tuple(0 if adapter is None else len(adapter.a) for adapter in self.linears)
        return ranks if any(ranks) and not self.drop else ()

    def tensors(self) -> list[Tensor]:
        """A and B of each adapter."""
        return [tensor for adapter in self.linears if adapter is not None for tensor in (adapter.a, adapter.b)]

    def merged(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor] | None:
        """The weights of the layer's Linears with their adapters in ``dtype``, one after the other in memory.

        An adapter with dropout is not part of the weight. None if no adapter is.
        """
        added = [None if a is None or a.dropout > 0 else (a.a, a.b, a.scale) for a in self.linears]
        return merged_weights([parameters[i] for i in WEIGHTS], added, dtype) if any(added) else None

    def read_input(self, wanted: Sequence[bool]) -> bool:
        """Whether the layer's input must be kept, for gradients of the adapters of query, key and value."""
        return any(wanted[: 2 * sum(adapter is not None for adapter in self.linears[:3])])

    def branches(self, seeds: Sequence[Tensor], dtype: torch.dtype, wanted: Sequence[bool]) -> list[Branch]:
        """The branches of qkv, out, up and down for a forward pass and its backward pass.

        ``seeds`` has one per Linear, if an adapter has dropout; ``wanted`` is of each of :meth:`tensors`.
        """
        wants = iter([want and self._differentiate for want in wanted])
        flags = [(False, False) if adapter is None else (next(wants), next(wants)) for adapter in self.linears]
        own = [None if a is None or a.dropout == 0 else seeds[i] for i, a in enumerate(self.linears)]
        each = list(zip(self.linears, own, flags, strict=True))
        branches = [Branch(each[some]) for some in _MATMULS]
        active = [branch for branch in branches if branch.active]
        if active:  # few launches for all of the layer's adapters
            held = [branch.adapters() for branch in active]
            copies = iter(
                cast_together([a.a for some in held for a in some] + [a.b for some in held for a in some], dtype)
            )
            all_a = [[next(copies) for _ in some] for some in held]
            torch._foreach_mul_([a for some in all_a for a in some], [a.scale for some in held for a in some])
            for branch, some in zip(active, all_a, strict=True):
                branch.prepare(some, [next(copies) for _ in some])
        return branches


class Branch:
    """The adapters of one matmul in one pass; without any, every method does nothing.

    Each Linear has an adapter, the seed of its dropout (None without dropout), and whether the gradients of A and of B
    are wanted.
    """

    a_RI: Tensor  # s · A of each adapter, one below the other
    b: Tensor  # B of each adapter, one after the other in one dimension

    def __init__(self, linears: Sequence[tuple[Adapter | None, Tensor | None, tuple[bool, bool]]]) -> None:
        self._held: list[_Held] = []
        self._ranks = [0 if adapter is None else adapter.b.shape[1] for adapter, _, _ in linears]
        for i, (adapter, seed, wanted) in enumerate(linears):
            if adapter is not None:
                width, own = adapter.b.shape
                outputs, before = slice(i * width, (i + 1) * width), sum(self._ranks[:i])
                self._held.append(_Held(adapter, seed, wanted, outputs, slice(before, before + own)))
        # Partial sums of the gradients of A without s (P, R, I), and of B (P, …) as ``b``, of the last backward pass.
        self.d_a: Tensor | None = None
        self.d_b: Tensor | None = None
        # Without a gradient or dropout, an adapter is only part of the weight, and there is nothing to compute.
        self.active = any(any(held.wanted) or held.seed is not None for held in self._held)

    def adapters(self) -> list[Adapter]:
        """The adapters, without a place for Linears that have none."""
        return [held.adapter for held in self._held]

    def prepare(self, each_a: Sequence[Tensor], each_b: Sequence[Tensor]) -> None:
        """Set :attr:`a_RI` and :attr:`b` from s · A and B of each adapter; each follow one another in memory."""
        first = each_a[0]
        self.a_RI = first.as_strided((sum(self._ranks), first.shape[1]), first.stride())
        self.b = each_b[0].as_strided((sum(b.numel() for b in each_b),), (1,))

    @property
    def drops(self) -> bool:
        """Whether an adapter has dropout."""
        return any(held.seed is not None for held in self._held)

    @property
    def is_simple(self) -> bool:
        """Whether the kernels that fuse GELU with these products support the branch: low ranks or none, no dropout."""
        return not self.active or (not self.drops and len(self.a_RI) <= MAX_WIDTH)

    def forward(self, x_TI: Tensor, y_TO: Tensor) -> Tensor | None:
        """z = s · A · dropout(x) (T, R), which the backward pass needs, or None if it does not.

        The results of adapters with dropout are added to the matmul's result, in place.
        """
        if not self.active:
            return None
        if not self.drops:
            return torch.mm(x_TI, self.a_RI.t())
        parts = []
        for held in self._held:
            parts.append(torch.mm(held.drop(x_TI), self.a_RI[held.ranks].t()))
            if held.seed is not None:
                y_TO[:, held.outputs].addmm_(parts[-1], held.of(self.b).t())
        return torch.cat(parts, 1)

    def from_gelu(self, x_TF: Tensor, y_TO: Tensor) -> Tensor | None:
        """As :meth:`forward` for the input GELU(x), which is only written to memory for adapters with dropout."""
        if self.active and self.is_simple:
            return gelu_narrow(x_TF, self.a_RI.t(), write=False)[1]
        return self.forward(gelu_forward(x_TF), y_TO) if self.active else None

    def through(self, dy_TO: Tensor, z_TR: Tensor | None, dx_TI: Tensor | None) -> Tensor | None:
        """The gradient of z without s (T, R), from that of the matmul's result; keeps the gradient of B.

        The share of adapters with dropout is added to the gradient of the matmul's input, in place, if that is given.
        The share of the others comes from the weight that they are part of.
        """
        if z_TR is None:
            return None
        if z_TR.shape[1] <= MAX_WIDTH:
            dz_TR, self.d_b = adapter_gradients(dy_TO, z_TR, self.b, self._ranks)
        else:
            dz_TR = torch.cat([torch.mm(dy_TO[:, held.outputs], held.of(self.b)) for held in self._held], 1)
            each = [_product(dy_TO[:, held.outputs], z_TR[:, held.ranks]).flatten() for held in self._held]
            self.d_b = torch.cat(each)[None]
        if dx_TI is not None and self.drops:
            for held in self._held:
                if held.seed is not None:
                    held.drop(torch.mm(dz_TR[:, held.ranks], self.a_RI[held.ranks]), add_to=dx_TI)
        return dz_TR

    def finish(self, x_TI: Tensor | None, dz_TR: Tensor | None) -> None:
        """Keep the gradient of A, from the matmul's input and what :meth:`through` returned."""
        if x_TI is None or dz_TR is None or not any(any(held.wanted) for held in self._held):
            return
        if not self.drops and dz_TR.shape[1] <= MAX_WIDTH:
            self.d_a = narrow_gradient(x_TI, dz_TR)
        elif self.drops:
            each = [_product(dz_TR[:, held.ranks], held.drop(x_TI)) for held in self._held]
            self.d_a = torch.cat(each)[None]
        else:
            self.d_a = _product(dz_TR, x_TI)[None]

    def gradients(self, d_a: Tensor | None, d_b: Tensor | None) -> list[tuple[Tensor | None, float, Tensor | None]]:
        """The gradient of each A without the scale, the scale, and the gradient of B, from the partial sums' totals."""
        found = []
        for held in self._held:
            of_a = d_a[held.ranks].to(held.adapter.a.dtype) if held.wanted[0] and d_a is not None else None
            of_b = None
            if held.wanted[1] and d_b is not None:
                of_b = held.of(d_b.flatten()).to(held.adapter.b.dtype)
            found.append((of_a, held.adapter.scale, of_b))
        return found


class _Held(NamedTuple):
    """An adapter of a branch. The seed is None without dropout."""

    adapter: Adapter
    seed: Tensor | None
    wanted: tuple[bool, bool]
    outputs: slice  # of its Linear, in the matmul's result
    ranks: slice  # of the branch's

    def of(self, every: Tensor) -> Tensor:
        """This adapter's slice (O, R) of :attr:`Branch.b`, or of a tensor with the same layout."""
        outputs, rank = self.adapter.b.shape
        return every[self.ranks.start * outputs :][: outputs * rank].view(outputs, rank)

    def drop(self, x_TC: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Apply the adapter's dropout to a tensor; with ``add_to``, add the result to that tensor in place."""
        return x_TC if self.seed is None else dropped(x_TC, self.adapter.dropout, self.seed, add_to)


def gradients_of(branches: Sequence[Branch]) -> list[Tensor | None]:
    """The gradients of A and B of each adapter of a layer, after the backward pass through its branches."""
    partial = [p for branch in branches for p in (branch.d_a, branch.d_b) if p is not None]
    found = iter([total for i in range(0, len(partial), MAX_TENSORS) for total in totals(partial[i : i + MAX_TENSORS])])
    each: list[tuple[Tensor | None, float, Tensor | None]] = []
    for branch in branches:
        each += branch.gradients(*(None if p is None else next(found) for p in (branch.d_a, branch.d_b)))
        branch.d_a = branch.d_b = None
    of_a = [(gradient, scale) for gradient, scale, _ in each if gradient is not None]
    if of_a:
        torch._foreach_mul_([gradient for gradient, _ in of_a], [scale for _, scale in of_a])
    return [gradient for d_a, _, d_b in each for gradient in (d_a, d_b)]


def gelu_and_z(branch: Branch, x_TF: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor | None]:
    """GELU(x) (T, F), and z of a branch that reads it, if the kernel supports the branch."""
    if tanh:
        return F.gelu(x_TF, approximate="tanh"), None
    if branch.active and branch.is_simple:
        result, z_TR = gelu_narrow(x_TF, branch.a_RI.t())
        assert result is not None
        return result, z_TR
    return gelu_forward(x_TF), None


class GeluGradients(NamedTuple):
    """The result of :func:`gelu_gradients`; None for what is not wanted, or left to the caller (``z_up``)."""

    x_TF: Tensor
    partial_sums: Tensor | None
    down_weight: Tensor | None
    z_up: Tensor | None


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
    down_buffer: Tensor | None = None,
) -> GeluGradients:
    """The gradients of GELU's input x, of its neighbours' adapters and of the down weight.

    ``grad_TF`` is the gradient of GELU's result, and overwritten; ``d_down_TH`` that of the down matmul's result;
    ``wanted`` and ``dtypes`` are of the layer's parameters. ``operand`` also receives the gradient of x in 8 bits, and
    ``down_buffer`` the down weight's gradient, if given.
    """
    dz_down = on_down.through(d_down_TH, z_down, grad_TF)
    simple = (on_up.active or on_down.active) and on_up.is_simple and on_down.is_simple
    if simple and not any(wanted[10:13]):  # nothing else needs GELU's result or the sums over tokens
        narrow = (z_up, on_up.b.view(-1, len(on_up.a_RI)) if on_up.active else None, dz_down)
        d_x, dz_up, on_up.d_b, on_down.d_a = gelu_backward_narrow(grad_TF, x_TF, *narrow, operand)
        return GeluGradients(d_x, None, None, dz_up)
    d_x, activated, sums = gelu_backward(grad_TF, x_TF, operand)
    d_down_w = weight_gradient(d_down_TH, activated, dtypes[12], down_buffer) if wanted[12] else None
    on_down.finish(activated, dz_down)
    return GeluGradients(d_x, sums, d_down_w, None)


def tanh_gradients(
    d_down_TH: Tensor,
    down_HF: Tensor,
    x_TF: Tensor,
    activated_TF: Tensor | None,
    on_down: Branch,
    z_down: Tensor | None,
    wanted: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    down_buffer: Tensor | None = None,
) -> GeluGradients:
    """As :func:`gelu_gradients` for the tanh form of GELU, from the down matmul's weight and GELU's result.

    The result is None if neither the gradient of the down weight nor those of its adapters are wanted.
    """
    if on_down.drops:  # which add to the gradient of GELU's result
        grad_TF = torch.mm(d_down_TH, down_HF)
        dz_down = on_down.through(d_down_TH, z_down, grad_TF)
        d_x: Tensor = torch.ops.aten.gelu_backward(grad_TF, x_TF, approximate="tanh")
    else:
        dz_down = on_down.through(d_down_TH, z_down, None)
        d_x = gelu_product_backward(d_down_TH, down_HF, x_TF)
    on_down.finish(activated_TF, dz_down)
    d_down_w = None
    if wanted[12]:
        assert activated_TF is not None
        d_down_w = weight_gradient(d_down_TH, activated_TF, dtypes[12], down_buffer)
    return GeluGradients(d_x, partial_sums(d_x) if wanted[11] else None, d_down_w, None)


def _product(grad_TO: Tensor, x_TI: Tensor) -> Tensor:
    return weight_gradient(grad_TO, x_TI, torch.float32)


def products(
    parameters: Sequence[Tensor],
    dtype: torch.dtype,
    kinds: Sequence[int] = (0, 1),
    merged: Sequence[Tensor] | None = None,
) -> list[list[Tensor]]:
    """The four matmuls' weights (kind 0) and biases (kind 1) in a dtype; query, key and value are one matmul.

    ``merged`` are the six Linears' weights with their adapters, in that dtype and one after the other in memory.
    """
    cast = [kind for kind in kinds if kind or merged is None]
    copies = iter([*(merged or ()), *cast_together([parameters[i + kind] for kind in cast for i in WEIGHTS], dtype)])
    results = []
    for _ in kinds:
        query, _, _, *others = (next(copies) for _ in range(6))
        # The copies of query, key and value follow one another in memory.
        three = query.as_strided((3 * len(query), *query.shape[1:]), query.stride())
        results.append([three, *others])
    return results


def parameter_gradients(
    dtypes: Sequence[torch.dtype],
    wanted: Sequence[bool],
    weights: Sequence[Tensor | None],
    partial_sums: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of a layer's parameters, in their order and dtypes; None for those that are not wanted.

    ``weights`` are those of qkv, out, up and down; ``partial_sums`` those of the second norm, the up projection, the
    first norm and qkv, or None if no parameter of theirs is wanted.
    """
    needs_sums = any(want for i, want in enumerate(wanted) if i not in WEIGHTS)
    sums2, d_up_b, sums1, d_qkv_b = totals_of(partial_sums) if needs_sums else [None] * 4
    d_qkv_w, d_out_w, d_up_w, d_down_w = weights
    norm2, norm1 = ([None] * 3 if sums is None else sums.unbind() for sums in (sums2, sums1))
    gradients = of_query_key_value(d_qkv_w, d_qkv_b)
    gradients += [d_out_w, norm1[2], norm1[0], norm1[1], d_up_w, d_up_b, d_down_w, norm2[2], norm2[0], norm2[1]]
    return in_dtypes(gradients, dtypes, wanted)


def of_query_key_value(weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
    """The gradients of weight and bias of query, key and value in turn, from those of their one matmul."""
    thirds = [[None] * 3 if three is None else three.chunk(3) for three in (weight, bias)]
    return [gradient for pair in zip(*thirds, strict=True) for gradient in pair]


def totals_of(partial_sums: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The total of each tensor of partial sums, of which at least one is given; None for the others."""
    found = iter(totals([partial for partial in partial_sums if partial is not None]))
    return [None if partial is None else next(found) for partial in partial_sums]


def in_dtypes(
    gradients: Sequence[Tensor | None], dtypes: Sequence[torch.dtype], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Each gradient in its parameter's dtype; None for those that are not wanted."""
    each = zip(gradients, dtypes, wanted, strict=True)
    return [g.to(dtype) if want and g is not None else None for g, dtype, want in each]


def weight_gradient(grad_TO: Tensor, x_TI: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """A weight's gradient (O, I), in ``out`` if given; torch 2.8 and newer write float32 directly."""
    if dtype == torch.float32 and grad_TO.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        if out is not None:
            return torch.ops.aten.mm.dtype_out(grad_TO.t(), x_TI, torch.float32, out=out)  # type: ignore[no-any-return]
        return torch.mm(grad_TO.t(), x_TI, out_dtype=torch.float32)
    return torch.mm(grad_TO.t(), x_TI)
