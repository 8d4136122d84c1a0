"""Compute a masked-LM head only for the tokens that have a label.

The loss reads no other logits. ModernBERT's config has this as ``sparse_prediction``; this module does it for every
supported family, and without a synchronization if the labels were counted on the host. It does so for batches that the
encoder leaves padded, too: both select slots of the padded hidden states.

Shapes: B rows, S slots per row, M labelled tokens, H hidden units.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from composer_speedups.packing.call import Call, ModelAroundEncoder, models_around_encoders, unwrapped
from composer_speedups.packing.derived_classes import stock_class
from composer_speedups.packing.tokens import (
    COUNTED_ON_HOST_MESSAGE,
    IGNORED,
    MULTIPLE,
    TokenLayout,
    as_numpy,
    lay_out_tokens,
    run_eagerly,
)

__all__ = [
    "LabelledHead",
    "MLMHead",
    "check_labelled_head",
    "count_labels",
    "head_tokens",
    "labelled_heads",
]

MLMHead = Literal["all", "labelled"]
_HEAD = "ForMaskedLM"
_STALE = "unpadding: the labels differ from the planned ones; plan every batch or none"


class LabelledHead:
    """The state of a masked-LM head that computes logits of labelled tokens only.

    In training calls with labels (B, S), the head gets the hidden states of the labelled tokens, (1, M, H), and the
    loss gets their labels, (1, M). The logits are then (1, M, vocabulary). All other calls are unchanged.

    Attributes:
        pad_to_multiple_of: M is rounded up to a multiple of it.
        layout: The labelled tokens of the next call, from :meth:`plan`. Without it, the call counts them, which
            synchronizes with the GPU.
        ran: Whether a call computed the head for labelled tokens only.
    """

    def __init__(self, pad_to_multiple_of: int = MULTIPLE) -> None:
        self.pad_to_multiple_of = pad_to_multiple_of
        self.layout: TokenLayout | None = None
        self.ran = False

    def plan(self, labels_BS: Tensor, total: int) -> None:
        """Lay out the next call's labelled tokens, from its labels on its device and their :func:`count_labels`."""
        self.layout = self._lay_out(labels_BS, total)

    def forget_plan(self) -> None:
        self.layout = None

    def select(self, model: PreTrainedModel, call: Call, inputs: dict[str, Any]) -> None:
        """In a training call with labels (B, S), choose the slots for which the model computes logits, and replace the
        labels in ``inputs`` by those of these slots, (1, M)."""
        labels = call.labels
        if not (model.training and torch.is_grad_enabled() and labels is not None and labels.ndim == 2):
            return
        base = unwrapped(model.base_model)
        if not isinstance(base, ModelAroundEncoder):  # a wrapper
            return
        indices_M, slots = self._layout_of(labels).indices_T, labels.numel()
        call.head_slots, call.head_base = indices_M, base
        # M is rounded up: the layout's unused entries have the index ``slots``, and get a label that the loss ignores.
        labels_M = labels.flatten().index_select(0, indices_M.clamp(max=slots - 1))
        inputs["labels"] = labels_M.where(indices_M < slots, IGNORED).unsqueeze(0)
        self.ran = True

    def _layout_of(self, labels_BS: Tensor) -> TokenLayout:
        if self.layout is None or self.layout.mask_BS.shape != labels_BS.shape:
            return self._count_and_lay_out(labels_BS)
        torch._assert_async((self.layout.mask_BS == (labels_BS != IGNORED)).all(), _STALE)
        return self.layout

    @run_eagerly(COUNTED_ON_HOST_MESSAGE)
    def _count_and_lay_out(self, labels_BS: Tensor) -> TokenLayout:
        return self._lay_out(labels_BS, count_labels(labels_BS))

    def _lay_out(self, labels_BS: Tensor, total: int) -> TokenLayout:
        return lay_out_tokens(labels_BS != IGNORED, total, self.pad_to_multiple_of)


def count_labels(labels_BS: Tensor) -> int:
    """Number of labelled tokens, on the host. Synchronizes if the labels are on a GPU."""
    return int((as_numpy(labels_BS) != IGNORED).sum())


def labelled_heads(model: nn.Module) -> list[LabelledHead]:
    """The masked-LM heads in a model that compute labelled tokens only."""
    heads = [around.call_rules.labelled_head for around in models_around_encoders(model)]
    return [head for head in heads if head is not None]


def head_tokens(model: nn.Module, batch: Any) -> int | None:
    """Number of tokens for which the head computes logits in training; None for every token.

    Counts labels on the CPU only; on a GPU that would synchronize.
    """
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, Tensor) or labels.device.type != "cpu" or not labelled_heads(model):
        return None
    return count_labels(labels)


def check_labelled_head(model: PreTrainedModel) -> None:
    """Check the class of a model.

    Raises:
        ValueError: It is not a ``...ForMaskedLM`` of transformers.
    """
    kind = stock_class(type(model))
    if not kind.__name__.endswith(_HEAD) or not kind.__module__.startswith("transformers.models."):
        raise ValueError(f"mlm_head='labelled' needs transformers' model with a masked-LM head, not {kind.__name__}")
