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
from composer_speedups.families.stock import Untouched

__all__ = ["FAMILIES", "FusedLayer", "compute_dtype"]


class FusedLayer(nn.Module):
    """What the layers share.

    Attributes:
        untouched: The modules inside the layer when it was fused. Once one of them was exchanged, hooked or patched,
            the layer runs its original forward.
        last_layer: What :func:`apply_fused_layers` was asked for.
        is_last: No other layer of its encoder reads what it computes.
        owner: Which :class:`FusedLayers` changed it, by a number of its own; None for :func:`apply_fused_layers`.
        ran: How the last forward pass went: ``"triton"``, ``"torch"``, ``"first tokens"``, ``"unfused"`` (packed
            tokens through the original forward), ``"stock"`` (a padded batch through it), or None before there was
            one.
    """

    untouched: Untouched
    last_layer: str = "all"
    is_last: bool = False
    owner: int | None = None
    ran: str | None = None

    @property
    def own_attention(self) -> str | None:
        """The attention kernel of the last forward pass, if it was none of PyTorch's, which would see none."""
        return "fused_layers' own" if self.ran == "triton" else None

    def parts(self) -> Parts:
        raise NotImplementedError

    def dropouts(self) -> list[tuple[nn.Module, nn.Dropout] | None]:
        """For each of :class:`Rates`, the module whose mode decides and the one that holds the probability."""
        raise NotImplementedError

    def rates(self, *, in_training: bool = False) -> Rates:
        """What is dropped now, or in training mode; a module inside may be in eval mode alone."""
        return Rates(
            *(each[1].p if each is not None and (in_training or each[0].training) else 0.0 for each in self.dropouts())
        )

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        unpadding: Plan | None = None,
        first_tokens_only: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """(1, T, H) → (1, T, H) with a plan; without one, whatever the original takes and gives.

        ``first_tokens_only``: nothing but each row's first token is read of the last layer's result; the others may
        be zeros.
        """
        if unpadding is None:
            self.ran = "stock"
            return super().forward(hidden_states, *args, **kwargs)
        if not self.untouched.still():
            self.ran = "unfused"
            return super().forward(hidden_states, *args, unpadding=unpadding, **kwargs)
        parts, rates = self.parts(), self.rates()
        x_TH = hidden_states.squeeze(0)
        if first_tokens_only and self.is_last:
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

    def dropouts(self) -> list[tuple[nn.Module, nn.Dropout] | None]:
        attention = self.attention.self  # it asks its own mode, and not that of its dropout
        projected, out = self.attention.output.dropout, self.output.dropout
        return [(attention, attention.dropout), (projected, projected), (out, out)]


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

    def dropouts(self) -> list[tuple[nn.Module, nn.Dropout] | None]:
        dropped = self.ffn.dropout
        return [(self.attention, self.attention.dropout), None, (dropped, dropped)]  # none on the attention's output


FAMILIES: dict[type[nn.Module], type[FusedLayer]] = {
    BertLayer: FusedBertLayer,
    RobertaLayer: FusedRobertaLayer,
    ElectraLayer: FusedElectraLayer,
    TransformerBlock: FusedDistilBertLayer,
}
