"""Layers and embeddings that compute with fused kernels.

Their classes are derived from transformers' (see :func:`~...packing.derived_classes.derived_class`); parameters, names
and settings do not change. If a kernel cannot run (CPU, float32, a batch that is not packed, a changed module), they
use torch's operators or the original forward.

Shapes: T packed tokens, H hidden units, A heads, D units per head, B rows, S slots per row; ``x_TAD`` is (T, A, D).
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composer_speedups.core.adapters import adapter_of, adapter_refusal, merged_weight
from composer_speedups.core.stock import Untouched
from composer_speedups.families.family import DropoutRates, Family, LayerModules, family_of
from composer_speedups.kernels import Shape
from composer_speedups.kernels.autocast import autocast_dtype
from composer_speedups.packing.attention import (
    PositionBias,
    attention_over_padded_rows,
    first_tokens_attention,
    real_keys,
    repad,
)
from composer_speedups.packing.disentangled_attention import Relative, first_tokens_disentangled_attention
from composer_speedups.packing.tokens import TokenLayout


class FusedLayer(nn.Module):
    """Mixin with the methods of a fused layer; the derived class inherits the original forward from transformers.

    Attributes:
        untouched: The layer's submodules when it was fused. If one of them is replaced, hooked or patched, the
            layer runs its original forward.
        last_layer, precision: See :func:`apply_fused_layers`.
        is_last: Whether it is the last layer of its encoder.
        owner: ID of the :class:`FusedLayers` instance that changed it; None for :func:`apply_fused_layers`.
        float8_scales: With ``precision="fp8"``, a non-persistent buffer with the scales of the matmuls' operands, which
            every forward pass in training updates.
        ran: How the last forward pass ran: ``"triton"``, ``"triton, fp8"``, ``"triton for first tokens"``, ``"torch"``,
            ``"first tokens"`` (with torch's operators), ``"unfused"`` (the original forward on packed tokens),
            ``"stock"`` (the original forward on a padded batch), or None before the first one.
    """

    prefix = "Fused"
    own_buffers = ("float8_scales",)
    untouched: Untouched
    last_layer: str = "all"
    precision: str = "autocast"
    float8_scales: Tensor
    is_last: bool = False
    owner: int | None = None
    ran: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        family = family_of(cls)
        if family is None:  # a mixin for another kind of layer
            return
        assert family.layer_modules is not None
        cls.layer_modules, cls.dropouts = family.layer_modules, family.dropouts  # type: ignore[method-assign, assignment]

    @property
    def own_attention(self) -> str | None:
        """This package's attention kernel, if the last forward pass used it; an operator recorder does not see it."""
        return "fused_layers' own" if self.ran is not None and self.ran.startswith("triton") else None

    def layer_modules(self) -> Any:
        """Return the layer's modules; replaced in subclasses by the :class:`Family`'s function."""
        raise NotImplementedError

    def dropouts(self) -> list[tuple[nn.Module, nn.Dropout] | None]:
        """Return the layer's dropout modules; replaced in subclasses by the :class:`Family`'s function."""
        raise NotImplementedError

    def rates(self, *, in_training: bool = False) -> DropoutRates:
        """Return the dropout rates that apply now (0 for a module in eval mode), or those of training mode."""
        return DropoutRates(
            *(site[1].p if site is not None and (in_training or site[0].training) else 0.0 for site in self.dropouts())
        )

    def refused_adapter(self) -> str | None:
        """Return why the kernels do not support the adapter that is active now, such as one of several; None if they
        do."""
        return next(filter(None, map(adapter_refusal, self.layer_modules().linears())), None)

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        layout: TokenLayout | None = None,
        first_tokens_only: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Map (1, T, H) to (1, T, H) with a :class:`TokenLayout`; without one, call the original forward.

        With ``first_tokens_only``, only each row's first token of the last layer's output is read, so the others may be
        zeros.
        """
        if layout is None:
            self.ran = "stock"
            return super().forward(hidden_states, *args, **kwargs)
        if not self.untouched.is_unchanged() or self.refused_adapter() is not None:
            self.ran = "unfused"
            return super().forward(hidden_states, *args, layout=layout, **kwargs)
        x_TH = hidden_states.squeeze(0)
        dtype = autocast_dtype(x_TH.device.type, x_TH.dtype)
        can_run_kernels = x_TH.is_cuda and dtype != torch.float32
        if first_tokens_only and self.is_last:
            self.ran = "triton for first tokens" if can_run_kernels else "first tokens"
            out_TH = self.first_tokens(x_TH, layout, **kwargs)
        elif can_run_kernels:
            self.ran = "triton" if self.precision == "autocast" else "triton, fp8"
            out_TH = self.by_kernels(x_TH, layout, dtype, **kwargs)
        else:
            self.ran = "torch"
            out_TH = self.by_torch(x_TH, layout, **kwargs)
        return out_TH.unsqueeze(0)

    def by_kernels(
        self, x_TH: Tensor, layout: TokenLayout, dtype: torch.dtype, bias: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Map (T, H) to (T, H) with Triton kernels and matmuls in ``dtype``; ``bias`` is that of the scores."""
        inputs = (x_TH.to(dtype), self.layer_modules(), self.rates(), layout.cu_seqlens, layout.longest)
        if self.precision == "autocast":
            from composer_speedups.algorithms.fused_layers.layer import fused_layer  # imports Triton

            return fused_layer(*inputs, bias)
        if dtype != torch.bfloat16:
            raise ValueError(f"fused_layers with precision='fp8' needs bf16 autocast, and the compute dtype is {dtype}")
        from composer_speedups.algorithms.fused_layers.float8_layer import float8_layer  # imports Triton

        return float8_layer(*inputs, self.float8_scales, bias, learn=self.training and torch.is_grad_enabled())

    def by_torch(self, x_TH: Tensor, layout: TokenLayout, **_: Any) -> Tensor:
        """Map (T, H) to (T, H) with torch's operators."""
        return plain_layer(x_TH, self.layer_modules(), self.rates(), layout)

    def first_tokens(self, x_TH: Tensor, layout: TokenLayout, **_: Any) -> Tensor:
        """Compute the output of each row's first token, with zeros elsewhere, (T, H) → (T, H).

        It is for a last layer whose head reads only first tokens. Keys and values are computed for all tokens; queries
        and everything after attention, only for one token per row.
        """
        modules, rates, first_BH = self.layer_modules(), self.rates(), _first_tokens(x_TH, layout)
        key_value = _projected(x_TH, modules.key, modules.value)
        attended_BH = _attend(modules.query(first_BH), key_value, layout, modules.heads, rates.attention_weights)
        return _scatter_first_tokens(_after_attention(attended_BH, first_BH, modules, rates), layout, len(x_TH))


class FusedGatedLayer(FusedLayer):
    """Mixin for fused layers with pre-norms and a gated feed-forward layer; with kernels, the output is float32.

    ``position_embeddings`` are the cosines and sines of the tokens' rotary angles, (1, T, D).
    """

    def refused_adapter(self) -> str | None:
        """Return None: no adapter is supported, so one that was added later is a change of the layer."""
        return None

    def by_kernels(
        self, x_TH: Tensor, layout: TokenLayout, dtype: torch.dtype, bias: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Map (T, H) to (T, H) with Triton kernels and matmuls in ``dtype``."""
        from composer_speedups.algorithms.fused_layers.gated_layer import gated_layer  # imports Triton

        cos_TD, sin_TD = (angles.squeeze(0) for angles in kwargs["position_embeddings"])
        inputs = (x_TH, self.layer_modules(), self.rates(), cos_TD, sin_TD)
        return gated_layer(*inputs, layout.cu_seqlens, layout.longest, dtype)

    def by_torch(self, x_TH: Tensor, layout: TokenLayout, **kwargs: Any) -> Tensor:
        """Map (T, H) to (T, H) with the original forward."""
        stock: Any = super(FusedLayer, self)
        return stock.forward(x_TH.unsqueeze(0), layout=layout, **kwargs).squeeze(0)  # type: ignore[no-any-return]

    def first_tokens(self, x_TH: Tensor, layout: TokenLayout, **kwargs: Any) -> Tensor:
        """Compute the output of each row's first token, with zeros elsewhere, (T, H) → (T, H)."""
        modules, rates = self.layer_modules(), self.rates()
        cos_TD, sin_TD = (angles.squeeze(0) for angles in kwargs["position_embeddings"])
        normed_TH = x_TH if modules.attention_norm is None else modules.attention_norm(x_TH)
        query, key_value = modules.qkv.weight.split([x_TH.shape[1], 2 * x_TH.shape[1]])
        query_BH, key_value = F.linear(_first_tokens(normed_TH, layout), query), F.linear(normed_TH, key_value)
        query_BH, key_value = _rotated_first(query_BH, key_value, cos_TD, sin_TD, layout, modules.heads)
        settings = (modules.heads, rates.attention_weights, modules.window)
        attended_BH = _attend(query_BH, key_value, layout, *settings)
        summed = _first_tokens(x_TH, layout) + F.dropout(modules.out(attended_BH), rates.attention)
        activated, gate = modules.up(modules.output_norm(summed)).chunk(2, -1)
        out_BH = summed + modules.down(F.dropout(F.gelu(activated) * gate, rates.output))
        return _scatter_first_tokens(out_BH, layout, len(x_TH))


class FusedRotaryLayer(FusedLayer):
    """Mixin for fused post-norm layers with rotary positions.

    ``position_embeddings`` are the cosines and sines of the tokens' rotary angles, (1, T, D).
    """

    def by_kernels(
        self, x_TH: Tensor, layout: TokenLayout, dtype: torch.dtype, bias: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Map (T, H) to (T, H) with Triton kernels and matmuls in ``dtype``."""
        from composer_speedups.algorithms.fused_layers.layer import fused_layer  # imports Triton

        cos_TD, sin_TD = (angles.squeeze(0) for angles in kwargs["position_embeddings"])
        inputs = (x_TH.to(dtype), self.layer_modules(), self.rates(), layout.cu_seqlens, layout.longest)
        return fused_layer(*inputs, bias, (cos_TD, sin_TD))

    def by_torch(self, x_TH: Tensor, layout: TokenLayout, **kwargs: Any) -> Tensor:
        """Map (T, H) to (T, H) with the original forward."""
        stock: Any = super(FusedLayer, self)
        return stock.forward(x_TH.unsqueeze(0), layout=layout, **kwargs).squeeze(0)  # type: ignore[no-any-return]

    def first_tokens(self, x_TH: Tensor, layout: TokenLayout, **kwargs: Any) -> Tensor:
        """Compute the output of each row's first token, with zeros elsewhere, (T, H) → (T, H)."""
        modules, rates, first_BH = self.layer_modules(), self.rates(), _first_tokens(x_TH, layout)
        cos_TD, sin_TD = (angles.squeeze(0) for angles in kwargs["position_embeddings"])
        key_value = _projected(x_TH, modules.key, modules.value)
        query_BH = modules.query(first_BH)
        query_BH, key_value = _rotated_first(query_BH, key_value, cos_TD, sin_TD, layout, modules.heads)
        attended_BH = _attend(query_BH, key_value, layout, modules.heads, rates.attention_weights)
        return _scatter_first_tokens(_after_attention(attended_BH, first_BH, modules, rates), layout, len(x_TH))


class FusedPreNormLayer(FusedLayer):
    """Mixin for fused layers with pre-norms and without a gate; with kernels, the residual stream is float32.

    ``position_embeddings`` are the cosines and sines of the tokens' rotary angles, (1, T, D), or None.
    """

    def refused_adapter(self) -> str | None:
        """Return None: no adapter is supported, so one that was added later is a change of the layer."""
        return None

    def by_kernels(
        self, x_TH: Tensor, layout: TokenLayout, dtype: torch.dtype, bias: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Map (T, H) to (T, H) with Triton kernels and matmuls in ``dtype``."""
        from composer_speedups.algorithms.fused_layers.pre_norm_layer import pre_norm_layer  # imports Triton

        inputs = (x_TH, self.layer_modules(), self.rates(), _angles_of(kwargs))
        return pre_norm_layer(*inputs, layout.cu_seqlens, layout.longest, dtype).to(x_TH.dtype)

    def by_torch(self, x_TH: Tensor, layout: TokenLayout, **kwargs: Any) -> Tensor:
        """Map (T, H) to (T, H) with the original forward."""
        stock: Any = super(FusedLayer, self)
        return stock.forward(x_TH.unsqueeze(0), layout=layout, **kwargs).squeeze(0)  # type: ignore[no-any-return]

    def first_tokens(self, x_TH: Tensor, layout: TokenLayout, **kwargs: Any) -> Tensor:
        """Compute the output of each row's first token, with zeros elsewhere, (T, H) → (T, H)."""
        modules, rates, angles = self.layer_modules(), self.rates(), _angles_of(kwargs)
        normed_TH = modules.attention_norm(x_TH)
        key_value = _projected(normed_TH, modules.key, modules.value)
        query_BH = modules.query(_first_tokens(normed_TH, layout))
        if angles is not None:
            query_BH, key_value = _rotated_first(query_BH, key_value, *angles, layout, modules.heads)
        attended_BH = _attend(query_BH, key_value, layout, modules.heads, rates.attention_weights)
        summed = _first_tokens(x_TH, layout) + F.dropout(modules.out(attended_BH), rates.attention)
        down = modules.down(F.gelu(modules.up(modules.output_norm(summed))))
        return _scatter_first_tokens(summed + F.dropout(down, rates.output), layout, len(x_TH))


class FusedPositionedLayer(FusedLayer):
    """Mixin for fused layers that get the layout in the argument with the tokens' positions.

    Attributes:
        positions: The name of the argument, and its class for packed tokens.
    """

    positions: ClassVar[tuple[str, type[Any]]]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Map (1, T, H) to (1, T, H), in a tuple, with positions of packed tokens; else call the original forward."""
        name, kind = self.positions
        positions = kwargs.get(name)
        if not isinstance(positions, kind):
            self.ran = "stock"
        elif not self.untouched.is_unchanged() or self.refused_adapter() is not None:
            self.ran = "unfused"
        else:
            out_TH = self._fused(hidden_states.squeeze(0), positions, **kwargs)
            if out_TH is not None:
                return out_TH.unsqueeze(0), None
            self.ran = "torch"
        return super(FusedLayer, self).forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def _fused(self, x_TH: Tensor, positions: Any, **kwargs: Any) -> Tensor | None:
        """Return (T, H) and set :attr:`ran`, or return None if the kernels cannot run."""
        modules, rates, layout = self.layer_modules(), self.rates(), positions.layout
        if positions.first_tokens_only and self.is_last:
            self.ran = "first tokens"
            first_BH = _first_tokens(x_TH, layout)
            query_BAD = modules.query(first_BH).unflatten(-1, (modules.heads, -1))
            key_value = _projected(x_TH, modules.key, modules.value)
            key, value = (repad(half, layout, modules.heads) for half in key_value.chunk(2, -1))
            attended_BH = self.attended_first(query_BAD, key, value, positions, rates.attention_weights, **kwargs)
            return _scatter_first_tokens(_after_attention(attended_BH, first_BH, modules, rates), layout, len(x_TH))
        dtype = autocast_dtype(x_TH.device.type, x_TH.dtype)
        if not x_TH.is_cuda or dtype == torch.float32:
            return None
        self.ran = "triton" if self.precision == "autocast" else "triton, fp8"
        return self.with_positions(x_TH, positions, dtype, **kwargs)

    def attended_first(
        self, query_BAD: Tensor, key_BASD: Tensor, value_BASD: Tensor, positions: Any, dropout: float, **kwargs: Any
    ) -> Tensor:
        """Return the attention output of each row's first token, (B, A·D)."""
        raise NotImplementedError

    def with_positions(self, x_TH: Tensor, positions: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
        """Map (T, H) to (T, H) with Triton kernels and matmuls in ``dtype``."""
        raise NotImplementedError


class FusedBiasedLayer(FusedPositionedLayer):
    """Mixin for fused MPNet layers, whose scores have a bias by distance."""

    positions = ("position_bias", PositionBias)

    def attended_first(
        self, query_BAD: Tensor, key_BASD: Tensor, value_BASD: Tensor, positions: Any, dropout: float, **_: Any
    ) -> Tensor:
        return first_tokens_attention(query_BAD, key_BASD, value_BASD, positions, dropout)

    def with_positions(self, x_TH: Tensor, positions: Any, dtype: torch.dtype, **_: Any) -> Tensor:
        return self.by_kernels(x_TH, positions.layout, dtype, positions.by_distance)


class FusedDisentangledLayer(FusedPositionedLayer):
    """Mixin for fused DeBERTa layers, which get the relative embeddings in another argument."""

    positions = ("relative_pos", Relative)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        family = family_of(cls)
        assert family is not None
        assert family.position_table is not None
        cls.position_table = family.position_table  # type: ignore[method-assign, assignment]

    def position_table(self, rel_embeddings: Tensor) -> Tensor:
        """Return the keys and queries of positions; replaced in subclasses by the :class:`Family`'s function."""
        raise NotImplementedError

    def attended_first(
        self, query_BAD: Tensor, key_BASD: Tensor, value_BASD: Tensor, positions: Any, dropout: float, **kwargs: Any
    ) -> Tensor:
        table = self.position_table(kwargs["rel_embeddings"])
        return first_tokens_disentangled_attention(query_BAD, key_BASD, value_BASD, table, positions, dropout)

    def with_positions(self, x_TH: Tensor, positions: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
        from composer_speedups.algorithms.fused_layers.layer import disentangled_layer  # imports Triton

        table, layout = self.position_table(kwargs["rel_embeddings"]).to(dtype), positions.layout
        inputs = (x_TH.to(dtype), self.layer_modules(), self.rates(), table, positions.entries)
        return disentangled_layer(*inputs, layout.cu_seqlens, layout.longest)


def plain_layer(x_TH: Tensor, modules: LayerModules, rates: DropoutRates, layout: TokenLayout) -> Tensor:
    """Compute a BERT layer with torch's operators, (T, H) → (T, H)."""
    query_TH, key_TH, value_TH = _projected(x_TH, modules.query, modules.key, modules.value).chunk(3, -1)
    attended_TH = attention_over_padded_rows(
        query_TH, key_TH, value_TH, layout, modules.heads, real_keys(layout), rates.attention_weights
    )
    return _after_attention(attended_TH, x_TH, modules, rates)


def _projected(x_TH: Tensor, *linears: nn.Linear) -> Tensor:
    """Apply several Linears, which may have adapters, as one matmul, and concatenate their results."""
    adapters = [adapter_of(linear) for linear in linears]
    if any(adapter is not None and adapter.dropout > 0 for adapter in adapters):  # each with an input of its own
        return torch.cat([linear(x_TH) for linear in linears], -1)
    weights = [merged_weight(linear.weight, adapter) for linear, adapter in zip(linears, adapters, strict=True)]
    return F.linear(x_TH, torch.cat(weights), torch.cat([linear.bias for linear in linears]))


def _attend(
    query_BH: Tensor, key_value: Tensor, layout: TokenLayout, heads: int, dropout: float, window: int | None = None
) -> Tensor:
    """Compute the attention output of each row's first token, (B, H), from packed keys and values (T, 2·H)."""
    if key_value.is_cuda and key_value.dtype in (torch.bfloat16, torch.float16):
        from composer_speedups.kernels.first_token_attention import first_token_attention  # imports Triton

        return first_token_attention(query_BH, key_value, layout.cu_seqlens, heads, dropout, window)
    key, value = (repad(half, layout, heads) for half in key_value.chunk(2, -1))
    seen = real_keys(layout)
    if window is not None:  # a row longer than the window has padding only at its end, so its slots are positions
        seen = seen & (torch.arange(seen.shape[-1], device=seen.device) <= window)
    query = query_BH.unflatten(-1, (heads, 1, -1))
    return F.scaled_dot_product_attention(query, key, value, seen, dropout).flatten(1)


def _angles_of(inputs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines of rotary angles among a layer's arguments, (1, T, D) → (T, D); None without any."""
    angles = inputs.get("position_embeddings")
    return None if angles is None else (angles[0].squeeze(0), angles[1].squeeze(0))


def _rotated_first(
    query_BH: Tensor, key_value: Tensor, cos_TD: Tensor, sin_TD: Tensor, layout: TokenLayout, heads: int
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


def _first_tokens(x_TH: Tensor, layout: TokenLayout) -> Tensor:
    """Return each row's first token, (T, H) → (B, H). An empty row gets a token of another row, which
    :func:`_scatter_first_tokens` drops."""
    starts = layout.cu_seqlens[: layout.mask_BS.shape[0]].long()
    return x_TH.index_select(0, starts.clamp(max=len(x_TH) - 1))


def _scatter_first_tokens(first_BH: Tensor, layout: TokenLayout, tokens: int) -> Tensor:
    """Scatter each row's first token to its position among zeros, (B, H) → (T, H)."""
    rows = layout.mask_BS.shape[0]
    starts, ends = layout.cu_seqlens[:rows].long(), layout.cu_seqlens[1 : rows + 1]
    slots = torch.where(ends > starts, starts, tokens)
    return first_BH.new_zeros(tokens + 1, first_BH.shape[1]).index_copy(0, slots, first_BH)[:-1]


def _after_attention(attended: Tensor, x: Tensor, modules: LayerModules, rates: DropoutRates) -> Tensor:
    projected = F.dropout(modules.out(attended), rates.attention)
    hidden = modules.attention_norm(projected + x)
    return modules.output_norm(F.dropout(modules.down(F.gelu(modules.up(hidden))), rates.output) + hidden)


class FusedEmbeddings(nn.Module):
    """Mixin with the methods of fused embeddings; the derived class inherits the original forward.

    Attributes:
        untouched: Its submodules when it was fused. If one of them is replaced, hooked or patched, the original
            forward runs.
        owner: ID of the :class:`FusedLayers` instance that changed it; None for :func:`apply_fused_layers`.
        ran: How the last forward pass ran: ``"triton"``, ``"stock"``, or None before the first one.
    """

    prefix = "Fused"
    family: ClassVar[Family]
    arguments: ClassVar[list[str]]  # names of the original forward's arguments
    untouched: Untouched
    owner: int | None = None
    ran: str | None = None
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
        """Map ids (B, S) to (B, S, H), with the original's arguments; in the autocast dtype if the kernel runs."""
        inputs = dict(zip(self.arguments, args, strict=False)) | kwargs
        others = {name: value for name, value in inputs.items() if name not in _INDEX_ARGUMENTS}
        input_ids, position_ids, token_type_ids = (inputs.get(name) for name in _INDEX_ARGUMENTS)
        if input_ids is None or not self._can_run(input_ids, others):
            self.ran = "stock"
            return super().forward(*args, **kwargs)
        from composer_speedups.kernels.embeddings import embed  # imports Triton

        self.ran = "triton"
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
            and self.untouched.is_unchanged()
            and not any(value is not None and (isinstance(value, Tensor) or value != 0) for value in others.values())
            and not torch.are_deterministic_algorithms_enabled()  # its backward pass adds atomically, in varying order
        )


_INDEX_ARGUMENTS = ("input_ids", "position_ids", "token_type_ids")


def modules_shape(layer: FusedLayer, embeddings: FusedEmbeddings | None) -> Shape:
    """Return the shape that a model's kernels are compiled for; ``embeddings`` is None if they are not fused."""
    modules, rates = layer.layer_modules(), layer.rates(in_training=True)
    hidden, embedded = modules.query.in_features, rates.output
    return Shape(
        hidden, modules.up.out_features, modules.heads, *rates,
        hidden if embeddings is None else embeddings.LayerNorm.weight.shape[0],
        embedded if embeddings is None else embeddings.dropout.p,
        isinstance(layer, FusedBiasedLayer),
    )  # fmt: skip
