"""Embedding modules of BERT, RoBERTa, ELECTRA and DistilBERT that compute in one kernel.

Each is a subclass that a module is turned into (see :mod:`..surgery`). Where the kernel does not run (CPU, float32,
embeddings given as such, deterministic mode), the original forward does.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.distilbert.modeling_distilbert import Embeddings as DistilBertEmbeddings
from transformers.models.electra.modeling_electra import ElectraEmbeddings
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from composer_speedups.algorithms.fused_layers.families import compute_dtype
from composer_speedups.families.stock import Untouched

__all__ = ["EMBEDDINGS", "FusedEmbeddings"]


class FusedEmbeddings(nn.Module):
    """What the modules share.

    Attributes:
        untouched: The modules inside when the module was fused; once one of them was exchanged, hooked or patched, the
            original forward runs.
        owner: Which :class:`FusedLayers` changed it, by a number of its own; None for :func:`apply_fused_layers`.
        ran: How the last forward pass went: ``"triton"``, ``"stock"``, or None before there was one.
    """

    untouched: Untouched
    owner: int | None = None
    ran: str | None = None
    word_embeddings: nn.Embedding
    position_embeddings: nn.Embedding
    LayerNorm: nn.LayerNorm
    dropout: nn.Dropout

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Ids (B, S) → (B, S, H), in the autocast dtype where the kernel runs; arguments as the original's."""
        given = dict(zip(_ARGUMENTS[type(self)], args, strict=False)) | kwargs
        others = {name: value for name, value in given.items() if name not in _READ}
        input_ids, position_ids, token_type_ids = (given.get(name) for name in _READ)
        if input_ids is None or not self._can_run(input_ids, others):
            self.ran = "stock"
            return super().forward(*args, **kwargs)
        from composer_speedups.kernels.embeddings import embed

        self.ran = "triton"
        width = input_ids.shape[1]
        positions = self._positions(input_ids) if position_ids is None else position_ids.contiguous()
        zeros = input_ids.new_zeros(1, width)
        types = zeros if token_type_ids is None else token_type_ids.contiguous()
        kinds = getattr(self, "token_type_embeddings", None)
        table = self.LayerNorm.weight.new_zeros(1, self.LayerNorm.weight.shape[0]) if kinds is None else kinds.weight
        word, position, norm = self.word_embeddings, self.position_embeddings, self.LayerNorm
        unused = [-1 if module.padding_idx is None else module.padding_idx for module in (word, position)]
        dropped = self.dropout.p if self.dropout.training else 0.0
        return embed(
            input_ids.contiguous(), positions, types, word.weight, position.weight, table, norm.weight, norm.bias,
            norm.eps, dropped, compute_dtype(norm.weight), (unused[0], unused[1]),
        )  # fmt: skip

    def _can_run(self, ids: Tensor, others: dict[str, Any]) -> bool:
        return (
            ids.is_cuda
            and compute_dtype(self.LayerNorm.weight) != torch.float32
            and self.untouched.still()
            and not any(value is not None and (isinstance(value, Tensor) or value != 0) for value in others.values())
            and not torch.are_deterministic_algorithms_enabled()  # its atomic additions are in no fixed order
        )

    def _positions(self, ids: Tensor) -> Tensor:
        return self.position_ids[:, : ids.shape[1]].contiguous()  # type: ignore[index, union-attr]


class FusedBertEmbeddings(FusedEmbeddings, BertEmbeddings):  # type: ignore[misc]
    pass


class FusedElectraEmbeddings(FusedEmbeddings, ElectraEmbeddings):  # type: ignore[misc]
    pass


class FusedRobertaEmbeddings(FusedEmbeddings, RobertaEmbeddings):  # type: ignore[misc]
    def _positions(self, ids: Tensor) -> Tensor:
        return self.create_position_ids_from_input_ids(ids, self.padding_idx)


class FusedDistilBertEmbeddings(FusedEmbeddings, DistilBertEmbeddings):  # type: ignore[misc]
    pass


EMBEDDINGS: dict[type[nn.Module], type[FusedEmbeddings]] = {
    BertEmbeddings: FusedBertEmbeddings,
    ElectraEmbeddings: FusedElectraEmbeddings,
    RobertaEmbeddings: FusedRobertaEmbeddings,
    DistilBertEmbeddings: FusedDistilBertEmbeddings,
}

_READ = ("input_ids", "position_ids", "token_type_ids")
_ARGUMENTS = {fused: list(inspect.signature(stock.forward).parameters)[1:] for stock, fused in EMBEDDINGS.items()}
