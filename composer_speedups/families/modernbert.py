"""ModernBERT and its unpadded version.

It has no encoder module: the model itself packs the tokens before its embeddings. Positions are applied inside
attention, so they are packed too. Local layers attend to a window of slots on either side, which equals a window of
packed tokens only in rows without holes.

Shapes: B rows, S slots per row, T packed tokens, H hidden units.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from composer_speedups.families.family import Family, GatedLayerModules, Reads, default_head_reads
from composer_speedups.families.flops import block_flops
from composer_speedups.packing.encoder import UnpaddedEncoder, UnpaddedModel
from composer_speedups.packing.tokens import TokenLayout, gather_tokens, mark_dynamic

__all__ = ["FAMILY"]


class _UnpaddedModernBert(UnpaddedModel):
    """Token ids (B, S) or embeddings (B, S, H) → transformers' output with the last hidden state (B, S, H), zeros at
    padding."""

    config: Any
    embeddings: nn.Module
    layers: nn.ModuleList
    rotary_emb: nn.Module
    final_norm: nn.Module

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        plan = self._call_plan()
        if plan.layout is None:
            stock: Any = super(UnpaddedEncoder, self)
            output = stock.forward(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
            return self._padded(plan, output)
        if inputs_embeds is None:
            assert input_ids is not None
            hidden = self.embeddings(input_ids=_pick(input_ids, plan.layout))
        else:
            packed = gather_tokens(inputs_embeds.flatten(0, 1), plan.layout.indices_T)
            hidden = self.embeddings(inputs_embeds=packed.unsqueeze(0))
        if plan.first_tokens_only:
            # a keyword argument, so that it is also passed when a layer is recomputed
            kwargs["first_tokens_only"] = True
        positions = self._positions(position_ids, plan.layout)
        return self._output(self._packed_layers(hidden, positions, plan.layout, kwargs), plan)

    def _packed_layers(self, hidden: Tensor, positions: Tensor, layout: TokenLayout, kwargs: dict[str, Any]) -> Tensor:
        """(1, T, H) → (1, T, H), through the layers and the last norm."""
        kinds = self.config.layer_types or []
        angles = {kind: self.rotary_emb(hidden, positions, kind) for kind in sorted(set(kinds))}
        for layer, kind in zip(self.layers, kinds, strict=True):
            mark_dynamic(hidden, *angles[kind])
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=angles[kind],
                layout=layout,
                **kwargs,
            )
        return self.final_norm(hidden)

    @staticmethod
    def _positions(position_ids: Tensor | None, layout: TokenLayout) -> Tensor:
        """(1, T): slots within their rows, or the caller's positions, (B, S) or (1, S)."""
        if position_ids is None:
            return (layout.indices_T % layout.mask_BS.shape[1]).unsqueeze(0)
        return _pick(position_ids.expand(layout.mask_BS.shape), layout)


def _pick(values_BS: Tensor, layout: TokenLayout) -> Tensor:
    """Integers per slot, (B, S) → per packed token, (1, T)."""
    flat = values_BS.reshape(-1)
    return flat.index_select(0, layout.indices_T.clamp(max=len(flat) - 1)).unsqueeze(0)


def _reads(model_class: str, config: Any) -> Reads:
    pools_real_tokens = getattr(config, "classifier_pooling", None) == "mean"
    if pools_real_tokens and model_class.endswith(("ForSequenceClassification", "ForMultipleChoice")):
        return Reads.REAL_TOKENS
    return default_head_reads(model_class, config)


def _max_width_with_holes(config: Any) -> int | None:
    """Up to this width, every slot is in every other's window, with or without holes between them."""
    return config.sliding_window + 1 if "sliding_attention" in (config.layer_types or ()) else None


def _modules(layer: Any) -> GatedLayerModules:
    attention, reach = layer.attn, layer.attn.sliding_window
    return GatedLayerModules(
        attention.Wqkv, attention.Wo, layer.mlp.Wi, layer.mlp.Wo,
        layer.attn_norm if isinstance(layer.attn_norm, nn.LayerNorm) else None, layer.mlp_norm,
        attention.config.num_attention_heads, None if reach is None else reach - 1,
    )  # fmt: skip


def _dropouts(layer: Any) -> list[Any]:
    attention, out, inner = layer.attn, layer.attn.out_drop, layer.mlp.drop
    weights = SimpleNamespace(p=attention.attention_dropout)  # not a separate module
    return [(attention, weights), (out, out) if isinstance(out, nn.Dropout) else None, (inner, inner)]


def _block_flops(config: Any, lengths: Tensor) -> int:
    """A local layer's tokens attend to themselves and to ``sliding_window`` tokens on either side."""
    full = int((lengths**2).sum())
    reach = lengths.clamp(min=1).sub(1).clamp(max=config.sliding_window)  # the furthest token that is in the window
    local = int((lengths * (2 * reach + 1) - reach * (reach + 1)).sum())
    pairs = sum(local if kind == "sliding_attention" else full for kind in config.layer_types)
    return block_flops(config, lengths, pairs=pairs, feed_forward_matrices=3)


FAMILY = Family(
    name="modernbert",
    title="ModernBERT",
    encoder="ModernBertModel",
    blocks="layers",
    layer="ModernBertEncoderLayer",
    embeddings="ModernBertEmbeddings",
    layer_modules=_modules,
    gated=True,
    dropouts=_dropouts,
    reads=_reads,
    max_width_with_holes=_max_width_with_holes,
    packed_encoder=_UnpaddedModernBert,
    block_flops=_block_flops,
    activation="hidden_activation",
    attention_dropout="attention_dropout",
    attention_output_dropout="attention_dropout",
    hidden_dropout="mlp_dropout",
)
