"""The weights of a fused layer's matmuls in their dtype, and the gradients of its parameters.

Shapes: T packed tokens, I inputs and O outputs of a matmul.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from composer_speedups.kernels.casts import cast_together
from composer_speedups.kernels.sums import totals

PARAMETERS = 16  # of a layer: weights and biases of six Linears and two LayerNorms
WEIGHTS = (0, 2, 4, 6, 10, 12)  # of query, key, value, out, up, down; the gradients of others are sums over tokens


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


def weight_gradient(grad_TO: Tensor, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight's gradient (O, I); torch 2.8 and newer write float32 directly."""
    if dtype == torch.float32 and grad_TO.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(grad_TO.t(), x_TI, out_dtype=torch.float32)
    return torch.mm(grad_TO.t(), x_TI)
