"""Variable-length attention over packed tokens, as an attention implementation of transformers.

It is torch's flash kernel in 16 bits on a GPU, or with a bias by distance a Triton kernel; elsewhere torch's operators.

transformers chooses an attention function by ``config._attn_implementation``. The attention modules of an unpadded
encoder get a :class:`PackedAttentionConfig`, so that they call this one; the model's own config does not change.

DeBERTa's disentangled attention does not go through that interface, and has a Triton kernel and torch's operators, too.

Shapes: B rows, S slots per row, T packed tokens, A heads, D units per head, H = A·D, L a bound on the length of a row,
P entries of the table of relative positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import AttentionInterface

from composer_speedups.kernels.common import missing_c_compiler, ran, to_autocast_dtype
from composer_speedups.packing.layout import Layout

IMPLEMENTATION = "unpadded"  # transformers assumes the flash-attn package for any name that contains "flash"


class PositionBias(NamedTuple):
    """Replaces a bias that is added to the scores of all pairs of slots, (1, A, S, S)."""

    layout: Layout  # rows have no holes, so packed tokens have the distances of their slots
    by_distance: Tensor  # float32 (A, 2·L + 1): the bias of distances from -L to L of a query from a key
    first_tokens_only: bool = False  # only each row's first token of the encoder's result is read

    def of_slots(self) -> Tensor:
        """The bias of all pairs of slots, (1, A, S, S)."""
        slots, longest = self.layout.mask_BS.shape[1], self.layout.longest
        near = self.by_distance[:, longest - slots + 1 : longest + slots]
        return near.unfold(1, slots, 1).flip(2).unsqueeze(0)


class Relative(NamedTuple):
    """Replaces the relative positions (1, S, S) of disentangled attention; see :class:`PositionBias`."""

    layout: Layout
    entries: Tensor  # int32 (2·L + 1,): the table's entry for each distance from -L to L of a query from a key
    first_tokens_only: bool = False


class PackedAttentionConfig:
    """A model's config as its attention modules see it: with this module's attention, and otherwise unchanged.

    ``eager`` is the function that transformers calls for the implementation ``"eager"``.
    """

    _attn_implementation = IMPLEMENTATION

    def __init__(self, config: Any, eager: Callable[..., Any]) -> None:
        self.config, self.eager = config, eager

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":  # copies and pickles ask for these before they are set
            raise AttributeError(name)
        return getattr(self.config, name)

    def padded_attention(self) -> Callable[..., Any]:
        """The attention function of the untouched model."""
        name = self.config._attn_implementation or "eager"
        return self.eager if name == "eager" else AttentionInterface()[name]  # type: ignore[no-any-return]


def unpadded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with transformers' signature; without a layout, the untouched model's attention function.

    Queries, keys and values are (1, A, T, D), where keys and values may have fewer heads, each for several consecutive
    heads of queries. The result is (1, T, A, D), and None for the weights. With a ``sliding_window``, rows have no
    holes, since flash attention counts packed tokens.

    Source: Dao, arXiv 2307.08691, through torch's aten operator.
    """
    if layout is None:
        given = {"sliding_window": sliding_window, "position_bias": position_bias}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        attend = module.config.padded_attention()  # type: ignore[operator, union-attr]
        return attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    ran("packed_layer")
    window = None if sliding_window is None else sliding_window - 1  # the largest distance on either side
    # the operators below are not in autocast's lists, and float32 rotary angles leave queries and keys in float32
    query, key, value = (to_autocast_dtype(x) for x in (query, key, value))
    heads = query.shape[1]
    if key.shape[1] != heads:
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    packed_TAD = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    if position_bias is not None and supports_triton_attention(query.device, query.dtype, query.shape[-1]):
        from composer_speedups.kernels.attention import biased_attention  # imports Triton

        ran("biased_attention")
        qkv = torch.cat([x.flatten(1) for x in packed_TAD], 1)
        rows = layout.cu_seqlens, layout.longest
        out_TH = biased_attention(qkv, position_bias.by_distance.contiguous(), *rows, heads, dropout, scaling)
        return out_TH.view(1, -1, heads, query.shape[-1]), None
    if position_bias is None and supports_flash_attention(query.device, query.dtype, query.shape[-1]):
        out_TAD = torch.ops.aten._flash_attention_forward(
            *packed_TAD,
            layout.cu_seqlens,
            layout.cu_seqlens,
            layout.longest,  # shorter rows cost almost nothing
            layout.longest,
            dropout,
            False,
            False,
            scale=scaling,
            window_size_left=window,
            window_size_right=window,
        )[0]
        return out_TAD.unsqueeze(0), None
    mask = real_keys(layout)
    # padding slots far from every token would attend to nothing, so each slot may attend to itself
    if window is not None:
        slots = torch.arange(layout.mask_BS.shape[1], device=query.device)
        distance_SS = (slots[:, None] - slots).abs()
        mask = (mask & (distance_SS <= window)) | (distance_SS == 0)
    if position_bias is not None:
        bias = position_bias.of_slots().to(query.dtype)
        mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)  # (B, A, S, S)
    query_TH, key_TH, value_TH = (x.flatten(1) for x in packed_TAD)
    out_TH = attention_over_padded_rows(query_TH, key_TH, value_TH, layout, heads, mask, dropout, scaling)
    return out_TH.view(1, -1, heads, query.shape[-1]), None


def attention_over_padded_rows(
    query_TH: Tensor,
    key_TH: Tensor,
    value_TH: Tensor,
    layout: Layout,
    heads: int,
    mask: Tensor,
    dropout: float,
    scaling: float | None = None,
) -> Tensor:
    """SDPA on padded slots, for devices and dtypes without a flash kernel; ``mask`` is (B, 1 or A, 1 or S, S)."""
    queries, keys, values = (repad(x, layout, heads) for x in (query_TH, key_TH, value_TH))
    out_BASD = F.scaled_dot_product_attention(queries, keys, values, mask, dropout, scale=scaling)
    return pack_heads(out_BASD, layout)


def first_tokens_attention(
    query_BAD: Tensor, key_BASD: Tensor, value_BASD: Tensor, bias: PositionBias, dropout: float
) -> Tensor:
    """The attention output of each row's first token only, (B, A·D), with the scores' bias and the scale 1/√D."""
    slots, longest = key_BASD.shape[2], bias.layout.longest
    bias_AS = bias.by_distance[:, longest - slots + 1 : longest + 1].flip(1).to(query_BAD.dtype)  # distances 0, -1, …
    mask = bias_AS[None, :, None].masked_fill(~real_keys(bias.layout), torch.finfo(bias_AS.dtype).min)
    return F.scaled_dot_product_attention(query_BAD.unsqueeze(2), key_BASD, value_BASD, mask, dropout).flatten(1)


def supports_flash_attention(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether torch's flash kernel supports these tensors. Others are computed on padded rows with SDPA."""
    return head_size % 8 == 0 and head_size <= 256 and has_16_bit_kernels(device, dtype)


def supports_triton_attention(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether this package's attention kernels support these tensors."""
    return head_size in (16, 32, 64, 128) and has_16_bit_kernels(device, dtype) and _runs_triton()


@functools.cache
def _runs_triton() -> bool:
    return find_spec("triton") is not None and missing_c_compiler() is None


def has_16_bit_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tensors are in 16 bits, on a GPU of compute capability 8.0 or newer."""
    is_16_bit = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return is_16_bit and torch.cuda.get_device_capability(device) >= (8, 0)


def repad(packed_TH: Tensor, layout: Layout, heads: int) -> Tensor:
    """Packed queries, keys or values of all heads, (T, A·D), in their padded slots, (B, A, S, D); zeros at padding."""
    return layout.scatter(packed_TH).unflatten(2, (heads, -1)).transpose(1, 2)


def pack_heads(x_BASD: Tensor, layout: Layout) -> Tensor:
    """The inverse of :func:`repad`: all heads in their padded slots, (B, A, S, D) → packed tokens (T, A·D)."""
    return layout.gather(x_BASD.transpose(1, 2).flatten(2))


def real_keys(layout: Layout) -> Tensor:
    """The keys to attend to, (B, 1, 1, S); in rows without real tokens all of them, because the result would be NaN."""
    return (layout.mask_BS | ~layout.mask_BS.any(-1, keepdim=True))[:, None, None, :]


def disentangled_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, relative: Relative, heads: int, dropout: float
) -> Tensor:
    """softmax((q kᵀ + q·position key + k·position query) / √(3·D)) v, (T, A·D).

    ``positions`` (P, 2·A·D) are the keys of the relative positions, then their queries.
    """
    ran("packed_layer")
    layout, size = relative.layout, query.shape[1] // heads
    if supports_triton_attention(query.device, query.dtype, size):
        from composer_speedups.kernels.disentangled_attention import attend  # imports Triton

        ran("disentangled_attention")
        qkv = torch.cat([query, key, value], 1)
        return attend(qkv, positions.contiguous(), relative.entries, layout.cu_seqlens, layout.longest, heads, dropout)
    queries, keys, values = (repad(x, layout, heads) for x in (query, key, value))
    bias_BASS = position_scores(queries, keys, positions, relative)
    return pack_heads(_biased_sdpa(queries, keys, values, bias_BASS, layout, dropout), layout)


def first_tokens_disentangled_attention(
    query_BAD: Tensor, key_BASD: Tensor, value_BASD: Tensor, positions: Tensor, relative: Relative, dropout: float
) -> Tensor:
    """The attention output of each row's first token only, (B, A·D)."""
    queries = query_BAD.unsqueeze(2)
    bias_BA1S = position_scores(queries, key_BASD, positions, relative)
    return _biased_sdpa(queries, key_BASD, value_BASD, bias_BA1S, relative.layout, dropout).flatten(1)


def position_scores(query_BAQD: Tensor, key_BASD: Tensor, positions: Tensor, relative: Relative) -> Tensor:
    """Unscaled position scores of the first Q queries and all keys, (B, A, Q, S)."""
    heads, first, slots = query_BAQD.shape[1], query_BAQD.shape[2], key_BASD.shape[2]
    table_2APD = positions.unflatten(1, (2, heads, -1)).permute(1, 2, 3, 0)  # (2, A, D, P)
    place = torch.arange(slots, device=query_BAQD.device)
    entry_QS = relative.entries.long()[place[:first, None] - place + relative.layout.longest]
    by_query = (query_BAQD @ table_2APD[0]).gather(3, entry_QS.expand(len(query_BAQD), heads, -1, -1))
    by_key = (key_BASD @ table_2APD[1]).gather(3, entry_QS.T.expand(len(key_BASD), heads, -1, -1))
    return by_query + by_key.transpose(2, 3)


def _biased_sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, layout: Layout, dropout: float) -> Tensor:
    scale = float((3 * query.shape[-1]) ** -0.5)
    bias = (bias * scale).masked_fill(~real_keys(layout), torch.finfo(bias.dtype).min)
    return F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)


# Registered at import, so that it is also available when a changed model is unpickled.
AttentionInterface.register(IMPLEMENTATION, unpadded_attention)
