"""ModernBERT and its unpadded version.

It has no encoder module: the model itself packs the tokens before its embeddings. Local layers attend to a window of
slots on either side, which equals a window of packed tokens only in rows without holes.

Shapes: T packed tokens, H hidden units.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from composer_speedups.families.family import Block, Family, GatedLayerModules, pooling_head_reads
from composer_speedups.families.flops import Lengths, block_flops
from composer_speedups.families.rotary import UnpaddedRotaryModel, packed_angles
from composer_speedups.packing.call import Call
from composer_speedups.packing.layout import Layout, mark_dynamic


class _UnpaddedModernBert(UnpaddedRotaryModel):
    """As :class:`UnpaddedRotaryModel`, with other angles in local layers, and a norm behind the last layer."""

    embeddings: nn.Module
    final_norm: nn.Module

    def prepare_call(self, call: Call, inputs: dict[str, Any]) -> dict[str, Any]:
        # The untouched model's masks have the configuration's window, packed attention has that of its modules.
        local: Any = next((layer for layer in self.layers if layer.attention_type == "sliding_attention"), None)
        call.padded |= local is not None and local.attn.sliding_window != self.config.sliding_window + 1
        return super().prepare_call(call, inputs)

    def _embed(self, inputs: dict[str, Any]) -> Tensor:
        inputs.pop("token_type_ids", None)  # as the untouched model, which ignores those of BERT's tokenizer
        return self.embeddings(**inputs)  # type: ignore[no-any-return]

    def _packed_layers(
        self, hidden: Tensor, position_ids: Tensor | None, layout: Layout, kwargs: dict[str, Any]
    ) -> Tensor:
        kinds: list[str] = [layer.attention_type for layer in self.layers]  # type: ignore[misc]
        angles = {kind: packed_angles(self.rotary_emb, hidden, position_ids, layout, kind) for kind in sorted({*kinds})}
        for layer, kind in zip(self.layers, kinds, strict=True):
            mark_dynamic(hidden, *angles[kind])
            hidden = layer(hidden, attention_mask=None, position_embeddings=angles[kind], layout=layout, **kwargs)
        return self.final_norm(hidden)  # type: ignore[no-any-return]


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


def _block_flops(config: Any, lengths: Lengths) -> int:
    """A local layer's tokens attend to themselves and to ``sliding_window`` tokens on either side."""
    full = int((lengths**2).sum())
    reach = np.clip(lengths - 1, 0, config.sliding_window)  # the furthest token that is in the window
    local = int((lengths * (2 * reach + 1) - reach * (reach + 1)).sum())
    pairs = sum(local if kind == "sliding_attention" else full for kind in config.layer_types)
    return block_flops(config, lengths, pairs=pairs, feed_forward_matrices=3)


MODERNBERT = Family(
    name="modernbert",
    title="ModernBERT",
    encoder="ModernBertModel",
    blocks="layers",
    layer="ModernBertEncoderLayer",
    embeddings="ModernBertEmbeddings",
    block=Block.GATED,
    layer_modules=_modules,
    dropouts=_dropouts,
    reads=pooling_head_reads,
    # Up to this width, every slot is in every other's window, with or without holes between them.
    max_width_with_holes=lambda config: (
        config.sliding_window + 1 if "sliding_attention" in (config.layer_types or ()) else None
    ),
    packed_encoder=_UnpaddedModernBert,
    block_flops=_block_flops,
    activation="hidden_activation",
)
