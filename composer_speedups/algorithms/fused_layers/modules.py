"""Layers and embeddings that compute with fused kernels.

Their classes are derived from transformers' (see :func:`~...packing.derived_classes.derived_class`); parameters, names
and settings do not change. If a kernel cannot run (on a CPU, in float32, for a batch that is not packed), they use
torch's operators or the original forward.

Shapes: T packed tokens, H hidden units, A heads, D units per head, B rows, S slots per row; ``x_TAD`` is (T, A, D).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composer_speedups.core.stock import adapter_of, adapter_refusal, merged_weight
from composer_speedups.families.family import Block, DropoutRates, Family, LayerModules, family_of
from composer_speedups.kernels import Shape
from composer_speedups.kernels.common import autocast_dtype, ran
from composer_speedups.packing.attention import (
    PositionBias,
    Relative,
    attention_over_padded_rows,
    first_tokens_attention,
    first_tokens_disentangled_attention,
    real_keys,
    repad,
)
from composer_speedups.packing.layout import Layout
from composer_speedups.packing.untouched import is_untouched

WITHOUT_ADAPTERS = (Block.PRE_NORM, Block.GATED)  # their kernels do not compute adapters


class Packed(NamedTuple):
    """A layer's arguments that describe the packed tokens."""

    layout: Layout
    first_tokens_only: bool  # only each row's first token of the encoder's result is read
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines of the tokens' rotary angles, (T, D) each
    positions: Any = None  # a PositionBias or Relative positions; None for other kinds of blocks
    embeddings: Tensor | None = None  # of relative positions, (P, H)


class FusedLayer(nn.Module):
    """Mixin with the methods of a fused layer; the derived class inherits the original forward from transformers."""

    prefix = "Fused"
    own_buffers = ("float8_scales",)
    family: ClassVar[Family]  # whose Family.block it computes
    layer_modules: ClassVar[Callable[..., Any]]  # of the family: the layer's modules
    dropouts: ClassVar[Callable[..., list[tuple[nn.Module, nn.Dropout] | None]]]  # likewise; see Family.dropouts
    precision: str = "bf16"
    approximate: str = "none"  # "none" or "tanh": the form of GELU, as torch names it
    has_epilogues: bool = False  # whether the kernels compute GELU's tanh form, as a part of the products around it
    float8_scales: Tensor  # in 8 bits, a non-persistent buffer, which every forward pass in training updates
    is_last: bool = False  # of its encoder

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        family = family_of(cls)
        assert family is not None
        assert family.layer_modules is not None
        assert family.dropouts is not None
        cls.family, cls.layer_modules, cls.dropouts = family, family.layer_modules, family.dropouts

    @property
    def hidden_size(self) -> int:
        return int(self.layer_modules().up.in_features)

    def rates(self, *, in_training: bool = False) -> DropoutRates:
        """The dropout rates that apply now (0 for a module in eval mode), or those of training mode."""
        return DropoutRates(
            *(site[1].p if site is not None and (in_training or site[0].training) else 0.0 for site in self.dropouts())
        )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(1, T, H) → (1, T, H) for packed tokens, in a tuple if the stock layer returns one; else the stock forward.

        If only first tokens are read, the last layer may return zeros for all others.
        """
        packed = self._packed(kwargs)
        if packed is None or self._has_refused_adapter():
            ran("stock_layer" if packed is None else "unfused_layer")
            return super().forward(hidden_states, *args, **kwargs)
        x_TH = hidden_states.squeeze(0)
        dtype = autocast_dtype(x_TH.device.type, x_TH.dtype)
        if packed.first_tokens_only and self.is_last:
            ran("first_tokens")
            out_TH = self.first_tokens(x_TH, packed)
        elif x_TH.is_cuda and dtype != torch.float32:
            ran("fused_layer_fp8" if self.precision == "fp8" else "fused_layer")
            out_TH = self.by_kernels(x_TH, packed, dtype)
        else:
            ran("torch_layer")
            if self.family.block is not Block.POST_NORM:
                return super().forward(hidden_states, *args, **kwargs)
            out_TH = plain_layer(x_TH, self.layer_modules(), self.rates(), packed.layout, self.approximate)
        ran("packed_layer")
        out = out_TH.unsqueeze(0)
        return out if packed.positions is None else (out, None)

    def _has_refused_adapter(self) -> bool:
        """Whether the kernels do not support an adapter that is active now, such as one of several."""
        if self.family.block in WITHOUT_ADAPTERS:
            return False
        return any(adapter_refusal(linear) is not None for linear in self.layer_modules().linears())

    def _packed(self, kwargs: dict[str, Any]) -> Packed | None:
        """Read the arguments; None if the batch is not packed."""
        first = kwargs.pop("first_tokens_only", False)
        if self.family.block in (Block.BIASED, Block.DISENTANGLED):
            positions = kwargs.get("position_bias" if self.family.block is Block.BIASED else "relative_pos")
            if not isinstance(positions, PositionBias | Relative):
                return None
            embeddings = kwargs.get("rel_embeddings")
            return Packed(positions.layout, positions.first_tokens_only, None, positions, embeddings)
        if (layout := kwargs.get("layout")) is None:
            return None
        angles = kwargs.get("position_embeddings")
        return Packed(layout, first, None if angles is None else (angles[0].squeeze(0), angles[1].squeeze(0)))

    def by_kernels(self, x_TH: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
        """(T, H) → (T, H) with Triton kernels and matmuls in ``dtype``."""
        modules, rates = self.layer_modules(), self.rates()
        rows = packed.layout.cu_seqlens, packed.layout.longest
        if self.family.block is Block.GATED:
            from composer_speedups.algorithms.fused_layers.pre_norm_layers import gated_layer  # imports Triton

            assert packed.angles is not None
            return gated_layer(x_TH, modules, rates, *packed.angles, *rows, dtype)
        if self.family.block is Block.PRE_NORM:
            from composer_speedups.algorithms.fused_layers.pre_norm_layers import pre_norm_layer  # imports Triton

            return pre_norm_layer(x_TH, modules, rates, packed.angles, *rows, dtype).to(x_TH.dtype)
        from composer_speedups.algorithms.fused_layers.layer import Positions, fused_layer  # imports Triton

        bias = packed.positions.by_distance if isinstance(packed.positions, PositionBias) else None
        positions = Positions(bias=bias, angles=packed.angles)
        if packed.embeddings is not None:
            positions = Positions(table=self._table(packed).to(dtype), entries=packed.positions.entries)
        if self.precision != "fp8":
            return fused_layer(x_TH.to(dtype), modules, rates, *rows, positions, tanh=self.has_epilogues)
        if dtype != torch.bfloat16:
            raise ValueError(f"fused_layers with precision='fp8' needs bf16 autocast, and the compute dtype is {dtype}")
        learn = self.training and torch.is_grad_enabled()
        return fused_layer(x_TH.to(dtype), modules, rates, *rows, positions, self.float8_scales, learn=learn)

    def first_tokens(self, x_TH: Tensor, packed: Packed) -> Tensor:
        """The output of each row's first token, with zeros elsewhere, (T, H) → (T, H).

        Keys and values are computed for all tokens; queries and everything after attention, only for one token per row.
        """
        modules, rates, layout = _in_16_bits(self.layer_modules(), x_TH.device), self.rates(), packed.layout
        is_gated, window, normed_TH = self.family.block is Block.GATED, None, x_TH
        if self.family.block in (Block.PRE_NORM, Block.GATED) and modules.attention_norm is not None:
            normed_TH = modules.attention_norm(x_TH)
        first_BH = _first_tokens(normed_TH, layout)
        if is_gated:
            query, key_value = modules.qkv.weight.split([x_TH.shape[1], 2 * x_TH.shape[1]])
            query_BH, key_value, window = F.linear(first_BH, query), F.linear(normed_TH, key_value), modules.window
        else:
            query_BH, key_value = modules.query(first_BH), _projected(normed_TH, modules.key, modules.value)
        if packed.angles is not None:
            query_BH, key_value = _rotated_first(query_BH, key_value, *packed.angles, layout, modules.heads)
        if packed.positions is None:
            attended_BH = _attend(query_BH, key_value, layout, modules.heads, rates.attention_weights, window)
        else:
            key, value = (repad(half, layout, modules.heads) for half in key_value.chunk(2, -1))
            inputs, dropout = (query_BH.unflatten(-1, (modules.heads, -1)), key, value), rates.attention_weights
            if packed.embeddings is None:
                attended_BH = first_tokens_attention(*inputs, packed.positions, dropout)
            else:
                table = self._table(packed)
                attended_BH = first_tokens_disentangled_attention(*inputs, table, packed.positions, dropout)
        if self.family.block not in (Block.PRE_NORM, Block.GATED):
            out_BH = _after_attention(attended_BH, first_BH, modules, rates, self.approximate)
        else:
            summed = _first_tokens(x_TH, layout) + F.dropout(modules.out(attended_BH), rates.attention)
            up = modules.up(modules.output_norm(summed))
            if is_gated:
                activated, gate = up.chunk(2, -1)
                out_BH = summed + modules.down(F.dropout(F.gelu(activated) * gate, rates.output))
            else:
                out_BH = summed + F.dropout(modules.down(F.gelu(up)), rates.output)
        return _scatter_first_tokens(out_BH, layout, len(x_TH))

    def _table(self, packed: Packed) -> Tensor:
        """Keys and queries of relative positions, (P, 2·A·D)."""
        assert self.family.position_table is not None
        assert packed.embeddings is not None
        return self.family.position_table(self, packed.embeddings)


class _Linear(NamedTuple):
    """A Linear of parameters that were cast before."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _in_16_bits(modules: Any, device: torch.device) -> Any:
    """Cast the Linears to autocast's dtype with one kernel, where autocast would launch one per parameter and gradient.
    The modules are returned unchanged on a CPU, or if a Linear has an adapter or is not float32."""
    dtype = autocast_dtype(device.type, torch.float32)
    linears: list[Any] = modules.linears() if isinstance(modules, LayerModules) else [None]
    plain = all(
        type(each) is nn.Linear and each.bias is not None and each.weight.dtype == torch.float32 for each in linears
    )
    if not plain or device.type != "cuda" or dtype == torch.float32 or torch.compiler.is_compiling():
        return modules
    from composer_speedups.kernels.casts import cast_parameters  # imports Triton

    copies = cast_parameters([*(each.weight for each in linears), *(each.bias for each in linears)], dtype)
    query, key, value, out, up, down = (_Linear(*pair) for pair in zip(copies[:6], copies[6:], strict=True))
    return modules._replace(query=query, key=key, value=value, out=out, up=up, down=down)


def plain_layer(
    x_TH: Tensor, modules: LayerModules, rates: DropoutRates, layout: Layout, approximate: str = "none"
) -> Tensor:
    """A BERT layer with torch's operators, (T, H) → (T, H)."""
    query_TH, key_TH, value_TH = _projected(x_TH, modules.query, modules.key, modules.value).chunk(3, -1)
    attended_TH = attention_over_padded_rows(
        query_TH, key_TH, value_TH, layout, modules.heads, real_keys(layout), rates.attention_weights
    )
    return _after_attention(attended_TH, x_TH, modules, rates, approximate)


def _projected(x_TH: Tensor, *linears: nn.Linear) -> Tensor:
    """The concatenated results of several Linears, which may have adapters, as one matmul."""
    adapters = [adapter_of(linear) for linear in linears]
    if any(adapter is not None and adapter.dropout > 0 for adapter in adapters):  # each with an input of its own
        return torch.cat([linear(x_TH) for linear in linears], -1)
    weights = [merged_weight(linear.weight, adapter) for linear, adapter in zip(linears, adapters, strict=True)]
    return F.linear(x_TH, torch.cat(weights), torch.cat([linear.bias for linear in linears]))


def _attend(
    query_BH: Tensor, key_value: Tensor, layout: Layout, heads: int, dropout: float, window: int | None = None
) -> Tensor:
    """The attention output of each row's first token, (B, H), from packed keys and values (T, 2·H)."""
    if key_value.is_cuda and key_value.dtype in (torch.bfloat16, torch.float16):
        from composer_speedups.kernels.first_token_attention import first_token_attention  # imports Triton

        return first_token_attention(query_BH, key_value, layout.cu_seqlens, heads, dropout, window)
    key, value = (repad(half, layout, heads) for half in key_value.chunk(2, -1))
    seen = real_keys(layout)
    if window is not None:  # a row longer than the window has padding only at its end, so its slots are positions
        seen = seen & (torch.arange(seen.shape[-1], device=seen.device) <= window)
    query = query_BH.unflatten(-1, (heads, 1, -1))
    return F.scaled_dot_product_attention(query, key, value, seen, dropout).flatten(1)


def _rotated_first(
    query_BH: Tensor, key_value: Tensor, cos_TD: Tensor, sin_TD: Tensor, layout: Layout, heads: int
) -> tuple[Tensor, Tensor]:
    """Rotate the queries of each row's first token, (B, H), and the keys of all tokens, in (T, 2·H)."""
    first_BD = [_first_tokens(angles, layout) for angles in (cos_TD, sin_TD)]
    query_BH = _rotated(query_BH.unflatten(-1, (heads, -1)), *first_BD).flatten(1)
    key_TH, value_TH = key_value.chunk(2, -1)
    key_TH = _rotated(key_TH.unflatten(-1, (heads, -1)), cos_TD, sin_TD).flatten(1)
    return query_BH, torch.cat([key_TH, value_TH], 1)


def _rotated(x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    turned = torch.cat([-x_TAD.chunk(2, -1)[1], x_TAD.chunk(2, -1)[0]], -1)
    return (x_TAD * cos_TD[:, None] + turned * sin_TD[:, None]).to(x_TAD.dtype)


def _first_tokens(x_TH: Tensor, layout: Layout) -> Tensor:
    """Each row's first token, (T, H) → (B, H). An empty row gets another row's token, which the scatter below drops."""
    starts = layout.cu_seqlens[: layout.mask_BS.shape[0]].long()
    return x_TH.index_select(0, starts.clamp(max=len(x_TH) - 1))


def _scatter_first_tokens(first_BH: Tensor, layout: Layout, tokens: int) -> Tensor:
    """Each row's first token in its position among zeros, (B, H) → (T, H)."""
    rows = layout.mask_BS.shape[0]
    starts, ends = layout.cu_seqlens[:rows].long(), layout.cu_seqlens[1 : rows + 1]
    slots = torch.where(ends > starts, starts, tokens)
    return first_BH.new_zeros(tokens + 1, first_BH.shape[1]).index_copy(0, slots, first_BH)[:-1]


def _after_attention(
    attended: Tensor, x: Tensor, modules: LayerModules, rates: DropoutRates, approximate: str
) -> Tensor:
    projected = F.dropout(modules.out(attended), rates.attention)
    hidden = modules.attention_norm(projected + x)
    activated = F.gelu(modules.up(hidden), approximate=approximate)
    return modules.output_norm(F.dropout(modules.down(activated), rates.output) + hidden)


class FusedEmbeddings(nn.Module):
    """Mixin with the methods of fused embeddings; the derived class inherits the original forward."""

    prefix = "Fused"
    family: ClassVar[Family]
    arguments: ClassVar[list[str]]  # names of the original forward's arguments
    word_embeddings: nn.Embedding
    position_embeddings: nn.Embedding
    LayerNorm: nn.LayerNorm
    dropout: nn.Dropout

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        family = family_of(cls)
        assert family is not None
        cls.family, cls.arguments = family, list(inspect.signature(super().forward).parameters)[1:]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Ids (B, S) → (B, S, H), with the original's arguments; in the autocast dtype if the kernel runs."""
        inputs = dict(zip(self.arguments, args, strict=False)) | kwargs
        others = {name: value for name, value in inputs.items() if name not in _INDEX_ARGUMENTS}
        input_ids, position_ids, token_type_ids = (inputs.get(name) for name in _INDEX_ARGUMENTS)
        if input_ids is None or not self._can_run(input_ids, others):
            ran("stock_embeddings")
            return super().forward(*args, **kwargs)
        from composer_speedups.kernels.embeddings import embed  # imports Triton

        ran("fused_embeddings")
        width = input_ids.shape[1]
        positions = self.family.positions(self, input_ids) if position_ids is None else position_ids.contiguous()
        zeros = input_ids.new_zeros(1, width)
        types = zeros if token_type_ids is None else token_type_ids.contiguous()
        kinds = getattr(self, "token_type_embeddings", None)
        table = self.LayerNorm.weight.new_zeros(1, self.LayerNorm.weight.shape[0]) if kinds is None else kinds.weight
        word, position, norm = self.word_embeddings, self.position_embeddings, self.LayerNorm
        unused = [-1 if module.padding_idx is None else module.padding_idx for module in (word, position)]
        dropped = self.dropout.p if self.dropout.training else 0.0
        return embed(
            input_ids.contiguous(), positions, types, word.weight, position.weight, table, norm.weight, norm.bias,
            norm.eps, dropped, autocast_dtype("cuda", norm.weight.dtype), (unused[0], unused[1]),
        )  # fmt: skip

    def _can_run(self, ids: Tensor, others: dict[str, Any]) -> bool:
        return (
            ids.is_cuda
            and autocast_dtype("cuda", self.LayerNorm.weight.dtype) != torch.float32
            and not is_untouched()
            and not any(value is not None and (isinstance(value, Tensor) or value != 0) for value in others.values())
            and not torch.are_deterministic_algorithms_enabled()  # its backward pass adds atomically, in varying order
        )


_INDEX_ARGUMENTS = ("input_ids", "position_ids", "token_type_ids")


def modules_shape(layer: FusedLayer, embeddings: FusedEmbeddings | None) -> Shape:
    """The shape that a model's kernels are compiled for; ``embeddings`` is None if they are not fused."""
    modules, rates = layer.layer_modules(), layer.rates(in_training=True)
    hidden, embedded = modules.query.in_features, rates.output
    return Shape(
        hidden, modules.up.out_features, modules.heads, *rates,
        hidden if embeddings is None else embeddings.LayerNorm.weight.shape[0],
        embedded if embeddings is None else embeddings.dropout.p,
        layer.family.block is Block.BIASED,
        layer.has_epilogues,
    )  # fmt: skip
