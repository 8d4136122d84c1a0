"""Models that embed the tokens themselves and rotate queries and keys by their positions, in their unpadded version.

Such a model packs the tokens before its embeddings. Positions are applied inside attention, so they are packed too.
With BERT's embeddings, these are Jina Embeddings v3 (BERT's blocks) and NomicBERT (post-norm blocks with gated
feed-forward layers, whose Linears have no biases).

Shapes: B rows, S slots per row, T packed tokens, D units per head, H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from composer_speedups.families.family import Block, Family, LayerModules
from composer_speedups.families.flops import block_flops
from composer_speedups.packing.call import CallPlan
from composer_speedups.packing.encoder import UnpaddedEncoder, UnpaddedModel
from composer_speedups.packing.layout import Layout, mark_dynamic

_EMBEDDED = ("input_ids", "token_type_ids", "inputs_embeds")
_INPUTS = (*_EMBEDDED, "position_ids", "attention_mask")


class UnpaddedRotaryModel(UnpaddedModel):
    """Token ids (B, S) or embeddings (B, S, H) → transformers' output with the last hidden state (B, S, H), zeros at
    padding."""

    config: Any
    rotary_emb: Any
    layers: nn.ModuleList

    @can_return_tuple
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._call_plan()
        if plan.layout is None:
            stock: Any = super(UnpaddedEncoder, self)
            return self._padded(plan, stock.forward(*args, **kwargs))
        kwargs |= dict(zip(self.argument_names, args, strict=False))
        inputs = {name: kwargs.pop(name, None) for name in _INPUTS}
        if plan.first_tokens_only:
            # a keyword argument, so that it is also passed when a layer is recomputed
            kwargs["first_tokens_only"] = True
        packed = self._embedded(inputs, plan.layout) if plan.prefix is None else plan.prefix.hidden
        layers = self._behind_prefix(plan)._packed_layers
        return self._output(layers(packed, inputs["position_ids"], plan.layout, kwargs), plan)

    def _embedded(self, inputs: dict[str, Any], layout: Layout) -> Tensor:
        """The model's arguments by name → the first hidden state, (1, T, H)."""
        embedding: Any = self.get_input_embeddings()  # type: ignore[operator]
        if embedding._forward_hooks or embedding._forward_pre_hooks:
            # They get the padded batch: the noise of NEFTune's hook depends on the width of its rows.
            padded = self._embed({name: inputs[name] for name in _EMBEDDED if inputs[name] is not None})
            return layout.gather(padded).unsqueeze(0)
        return self._embed(self._packed_inputs(inputs, layout))

    def _embed(self, inputs: dict[str, Any]) -> Tensor:
        """Token ids or embeddings, and token types, by name, all padded or all packed → the first hidden state."""
        raise NotImplementedError

    def _packed_layers(
        self, hidden: Tensor, position_ids: Tensor | None, layout: Layout, kwargs: dict[str, Any]
    ) -> Tensor:
        """(1, T, H) → (1, T, H), through the layers and the last norm."""
        angles = packed_angles(self.rotary_emb, hidden, position_ids, layout)
        for layer in [*self.layers][: self.config.num_hidden_layers]:  # as the untouched model
            mark_dynamic(hidden, *angles)
            hidden = layer(hidden, attention_mask=None, position_embeddings=angles, layout=layout, **kwargs)
        return hidden

    @staticmethod
    def _packed_inputs(inputs: dict[str, Any], layout: Layout) -> dict[str, Tensor]:
        """Token ids, (1, T), or embeddings, (1, T, H), by name; and token types, if the model was called with some."""
        ids, embeddings, types = (inputs[name] for name in ("input_ids", "inputs_embeds", "token_type_ids"))
        packed = {}
        if ids is not None:
            packed["input_ids"] = layout.pick(ids)
        else:
            packed["inputs_embeds"] = layout.gather(embeddings).unsqueeze(0)
        if types is not None:
            packed["token_type_ids"] = layout.pick(types.expand(layout.mask_BS.shape))
        return packed


class UnpaddedRotaryBert(UnpaddedRotaryModel):
    """As :class:`UnpaddedRotaryModel`, with BERT's embeddings except for positions, and with a pooler or None."""

    output_class: ClassVar[type[Any]] = BaseModelOutputWithPooling
    embeddings: nn.Module
    pooler: nn.Module | None

    def _embed(self, inputs: dict[str, Any]) -> Tensor:
        return self.embeddings(**inputs)  # type: ignore[no-any-return]

    def _output(self, last: Tensor, plan: CallPlan) -> Any:
        hidden: Any = self._scattered(last, plan)
        pooled = None if self.pooler is None else self.pooler(hidden)
        return self.output_class(last_hidden_state=hidden, pooler_output=pooled)


def packed_angles(
    rotary: Callable[..., tuple[Tensor, Tensor]],
    hidden: Tensor,
    position_ids: Tensor | None,
    layout: Layout,
    *kind: str,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the packed tokens' rotary angles, (1, T, D) each.

    Computed for the padded slots, as in the untouched model: some kinds of angles depend on the longest row.

    Args:
        rotary: The model's module, (hidden state, positions, *kind) → cosines and sines of positions.
        hidden: A tensor with the hidden states' device and dtype.
        position_ids: The caller's positions, (B, S) or (1, S); None for slots within the row.
        layout: The layout of the packed tokens.
    """
    width = layout.mask_BS.shape[1]
    if position_ids is None:
        position_ids = torch.arange(width, device=layout.indices_T.device).unsqueeze(0)
    cos, sin = rotary(hidden, position_ids, *kind)
    slots = len(cos) * width
    # one row of positions is that of all rows; unused entries take any
    indices_T = layout.indices_T % width if len(cos) == 1 else layout.indices_T.clamp(max=slots - 1)
    cos, sin = (angles.flatten(0, 1).index_select(0, indices_T).unsqueeze(0) for angles in (cos, sin))
    return cos, sin


def _jina_modules(layer: Any) -> LayerModules:
    attention, mlp = layer.self_attn, layer.mlp
    heads = attention.q_proj.out_features // attention.head_dim
    return LayerModules(
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.post_attention_layernorm,
        mlp.fc1, mlp.fc2, layer.post_mlp_layernorm, heads,
    )  # fmt: skip


def _jina_dropouts(layer: Any) -> list[Any]:
    weights = SimpleNamespace(p=layer.self_attn.attention_dropout)  # not a separate module
    projected, out = layer.post_attention_dropout, layer.post_mlp_dropout
    return [(layer.self_attn, weights), (projected, projected), (out, out)]


JINA_EMBEDDINGS_V3 = Family(
    name="jina_embeddings_v3",
    title="Jina Embeddings v3",
    encoder="JinaEmbeddingsV3Model",
    blocks="layers",
    layer="JinaEmbeddingsV3Layer",
    embeddings="JinaEmbeddingsV3Embeddings",
    feed_forward=("fc1", "activation_fn", "fc2"),
    block=Block.ROTARY,
    layer_modules=_jina_modules,
    dropouts=_jina_dropouts,
    packed_encoder=UnpaddedRotaryBert,
)


NOMIC_BERT = Family(
    name="nomic_bert",
    title="NomicBERT",
    encoder="NomicBertModel",
    blocks="layers",
    layer="NomicBertLayer",
    embeddings="NomicBertEmbeddings",
    packed_encoder=UnpaddedRotaryBert,
    block_flops=lambda config, lengths: block_flops(
        config, lengths, feed_forward_matrices=3, attention_width=config.num_attention_heads * config.head_dim
    ),
)
