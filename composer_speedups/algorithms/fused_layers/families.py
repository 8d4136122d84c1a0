"""Encoder layers of BERT, RoBERTa, ELECTRA and DistilBERT that compute packed tokens with fused kernels.

Each is a subclass that a layer is turned into (see :mod:`..surgery`); a batch that was not packed goes to the original
forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.distilbert.modeling_distilbert import TransformerBlock
from transformers.models.electra.modeling_electra import ElectraLayer
from transformers.models.roberta.modeling_roberta import RobertaLayer

from composer_speedups.algorithms.fused_layers.parts import Parts, Rates
from composer_speedups.algorithms.fused_layers.plain import first_tokens_layer, plain_layer
from composer_speedups.algorithms.unpadding.plan import Plan

__all__ = ["FAMILIES", "FusedLayer", "compute_dtype"]


class FusedLayer(nn.Module):
    """What the layers share.

    Attributes:
        first_tokens_only: The head reads each row's first token alone, and this is the last layer.
        ran: How the last forward pass went: ``"triton"``, ``"torch"``, ``"first tokens"``, ``"stock"``, or None
            before there was one.
    """

    first_tokens_only: bool = False
    ran: str | None = None

    @property
    def own_attention(self) -> str | None:
        """The attention kernel of the last forward pass, if it was none of PyTorch's, which would see none."""
        return "fused_layers' own" if self.ran == "triton" else None

    def parts(self) -> Parts:
        raise NotImplementedError

    def rates(self) -> Rates:
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, *args: Any, unpadding: Plan | None = None, **kwargs: Any) -> Tensor:
        """(1, T, H) → (1, T, H) with a plan; without one, whatever the original takes and gives."""
        if unpadding is None:
            self.ran = "stock"
            return super().forward(hidden_states, *args, **kwargs)
        parts, rates = self.parts(), self.rates() if self.training else Rates(0.0, 0.0, 0.0)
        x_TH = hidden_states.squeeze(0)
        if self.first_tokens_only:
            self.ran = "first tokens"
            return first_tokens_layer(x_TH, parts, rates, unpadding).unsqueeze(0)
        dtype = compute_dtype(x_TH)
        if not x_TH.is_cuda or dtype == torch.float32:
            self.ran = "torch"
            return plain_layer(x_TH, parts, rates, unpadding).unsqueeze(0)
        from composer_speedups.algorithms.fused_layers.layer import fused_layer

        self.ran = "triton"
        return fused_layer(x_TH.to(dtype), parts, rates, unpadding.cu_seqlens, unpadding.longest).unsqueeze(0)


def compute_dtype(x: Tensor) -> torch.dtype:
    """That of autocast, or the tensor's own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class _BertLike(FusedLayer):
    attention: Any
    intermediate: Any
    output: Any

    def parts(self) -> Parts:
        attention = self.attention.self
        return Parts(
            attention.query, attention.key, attention.value, self.attention.output.dense,
            self.attention.output.LayerNorm, self.intermediate.dense, self.output.dense, self.output.LayerNorm,
            attention.num_attention_heads,
        )  # fmt: skip

    def rates(self) -> Rates:
        return Rates(self.attention.self.dropout.p, self.attention.output.dropout.p, self.output.dropout.p)


class FusedBertLayer(_BertLike, BertLayer):  # type: ignore[misc]
    pass


class FusedRobertaLayer(_BertLike, RobertaLayer):  # type: ignore[misc]
    pass


class FusedElectraLayer(_BertLike, ElectraLayer):  # type: ignore[misc]
    pass


class FusedDistilBertLayer(FusedLayer, TransformerBlock):
    def parts(self) -> Parts:
        attention, ffn = self.attention, self.ffn
        return Parts(
            attention.q_lin, attention.k_lin, attention.v_lin, attention.out_lin, self.sa_layer_norm,
            ffn.lin1, ffn.lin2, self.output_layer_norm, attention.n_heads,
        )  # fmt: skip

    def rates(self) -> Rates:
        return Rates(self.attention.dropout.p, 0.0, self.ffn.dropout.p)  # nothing drops the attention's output


FAMILIES: dict[type[nn.Module], type[FusedLayer]] = {
    BertLayer: FusedBertLayer,
    RobertaLayer: FusedRobertaLayer,
    ElectraLayer: FusedElectraLayer,
    TransformerBlock: FusedDistilBertLayer,
}
