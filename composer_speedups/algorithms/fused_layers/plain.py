"""The same layer in torch's own operators, for processors without Triton; and a last layer that leaves out what the
head does not read.

Shapes: T packed tokens, H hidden units, A heads, D units a head, B rows, S slots a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from composer_speedups.algorithms.fused_layers.parts import Parts, Rates
from composer_speedups.algorithms.unpadding.plan import Plan, gather_tokens, scatter_tokens

__all__ = ["first_tokens_layer", "plain_layer"]


def plain_layer(x_TH: Tensor, parts: Parts, rates: Rates, plan: Plan) -> Tensor:
    """(T, H) → (T, H)."""
    weight = torch.cat([parts.query.weight, parts.key.weight, parts.value.weight])
    bias = torch.cat([parts.query.bias, parts.key.bias, parts.value.bias])
    query, key, value = (_repad(each, plan, parts.heads) for each in F.linear(x_TH, weight, bias).chunk(3, -1))
    attended = F.scaled_dot_product_attention(query, key, value, _keys(plan), rates.weights)
    packed = gather_tokens(attended.transpose(1, 2).reshape(plan.mask_BS.numel(), -1), plan.indices_T)
    return _after_attention(packed, x_TH, parts, rates)


def first_tokens_layer(x_TH: Tensor, parts: Parts, rates: Rates, plan: Plan) -> Tensor:
    """(T, H) → (T, H) with the output of each row's first token, and zeros elsewhere.

    For a last layer under a head that reads nothing else: keys and values of all tokens, but queries, and all that
    comes after attention, of one token a row.
    """
    rows = plan.mask_BS.shape[0]
    starts, ends = plan.cu_seqlens[:rows].long(), plan.cu_seqlens[1 : rows + 1]
    first_BH = x_TH.index_select(0, starts.clamp(max=len(x_TH) - 1))  # of an empty row: another's, dropped below
    query_BAD = F.linear(first_BH, parts.query.weight, parts.query.bias).unflatten(-1, (parts.heads, -1))
    weight, bias = (torch.cat([getattr(parts.key, n), getattr(parts.value, n)]) for n in ("weight", "bias"))
    key, value = (_repad(each, plan, parts.heads) for each in F.linear(x_TH, weight, bias).chunk(2, -1))
    attended = F.scaled_dot_product_attention(query_BAD.unsqueeze(2), key, value, _keys(plan), rates.weights)
    out_BH = _after_attention(attended.flatten(1), first_BH, parts, rates)
    slots = torch.where(ends > starts, starts, len(x_TH))
    return out_BH.new_zeros(len(x_TH) + 1, out_BH.shape[1]).index_copy(0, slots, out_BH)[:-1]


def _repad(packed_TH: Tensor, plan: Plan, heads: int) -> Tensor:
    """(T, A·D) → (B, A, S, D)."""
    padded = scatter_tokens(packed_TH, plan.indices_T, plan.mask_BS.numel())
    return padded.view(*plan.mask_BS.shape, heads, -1).transpose(1, 2)


def _keys(plan: Plan) -> Tensor:
    """Which keys are attended to, (B, 1, 1, S); all of them in a row without any, which would get NaN."""
    return (plan.mask_BS | ~plan.mask_BS.any(-1, keepdim=True))[:, None, None, :]


def _after_attention(attended: Tensor, x: Tensor, parts: Parts, rates: Rates) -> Tensor:
    projected = F.dropout(parts.out(attended), rates.attention)
    hidden = parts.attention_norm(projected + x)
    return parts.output_norm(F.dropout(parts.down(F.gelu(parts.up(hidden))), rates.output) + hidden)
