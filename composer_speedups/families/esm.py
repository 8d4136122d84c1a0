"""ESM, such as the protein models ESM-2: pre-norm blocks with rotary or absolute positions, and their unpadded version.

The embeddings scale each row by its share of masked tokens (``token_dropout``) and read the attention mask, so the
model embeds the padded batch as the untouched model does, and packs the result.

Shapes: B rows, S slots per row, T packed tokens, H hidden units.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from composer_speedups.families.family import Block, Family, LayerModules
from composer_speedups.families.rotary import UnpaddedRotaryBert, packed_angles
from composer_speedups.packing.layout import Layout, mark_dynamic


class _UnpaddedEsm(UnpaddedRotaryBert):
    """As :class:`UnpaddedRotaryBert`, with the blocks in a module of their own."""

    output_class = BaseModelOutputWithPoolingAndCrossAttentions
    encoder: nn.Module
    rotary_embeddings: nn.Module | None  # None with absolute positions, which the embeddings add

    def _embedded(self, inputs: dict[str, Any], layout: Layout) -> Tensor:
        embedded = inputs["inputs_embeds"]  # to which the untouched model adds nothing
        if embedded is None:
            names = ("input_ids", "attention_mask", "position_ids")
            embedded = self.embeddings(**{name: inputs[name] for name in names})
        return layout.gather(embedded).unsqueeze(0)

    def _packed_layers(
        self, hidden: Tensor, position_ids: Tensor | None, layout: Layout, kwargs: dict[str, Any]
    ) -> Tensor:
        angles = None
        mark_dynamic(hidden)
        if self.rotary_embeddings is not None:
            angles = packed_angles(self.rotary_embeddings, hidden, position_ids, layout)
            mark_dynamic(*angles)
        kwargs["encoder_attention_mask"] = None  # of a second input, which a decoder has
        output: Any = self.encoder(hidden, attention_mask=None, position_embeddings=angles, layout=layout, **kwargs)
        return output[0]  # type: ignore[no-any-return]


def _modules(layer: Any) -> LayerModules:
    attention = layer.attention.self
    return LayerModules(
        attention.query, attention.key, attention.value, layer.attention.output.dense, layer.attention.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.LayerNorm, attention.num_attention_heads,
    )  # fmt: skip


def _dropouts(layer: Any) -> list[Any]:
    attention = layer.attention.self
    weights = SimpleNamespace(p=attention.dropout)  # not a separate module
    projected, out = layer.attention.output.dropout, layer.output.dropout
    return [(attention, weights), (projected, projected), (out, out)]


ESM = Family(
    name="esm",
    title="ESM-2",
    encoder="EsmModel",
    blocks="encoder.layer",
    layer="EsmLayer",
    embeddings="EsmEmbeddings",
    block=Block.PRE_NORM,
    layer_modules=_modules,
    dropouts=_dropouts,
    packed_encoder=_UnpaddedEsm,
    activation=None,
)
