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

from composer_speedups.kernels.host import ran
from composer_speedups.packing.call import Call, ModelAroundEncoder, known_batch, models_around_encoders, unwrapped
from composer_speedups.packing.derived_classes import stock_class
from composer_speedups.packing.layout import COUNTED_ON_HOST_MESSAGE, Layout, lay_out, run_eagerly
from composer_speedups.packing.rows import IGNORED, ROW_LABELS, as_numpy

MLMHead = Literal["all", "labelled"]
_HEAD = "ForMaskedLM"
_STALE = "unpadding: the labels changed after they were counted; change batches before they are moved to the device"


class LabelledHead:
    """In training calls with labels (B, S), the head gets the hidden states of the labelled tokens, (1, M, H), and the
    loss gets their labels, (1, M), so the logits are (1, M, vocabulary). M is rounded up to a multiple of
    ``pad_to_multiple_of``."""

    def __init__(self, pad_to_multiple_of: int) -> None:
        self.pad_to_multiple_of = pad_to_multiple_of

    def select(self, model: PreTrainedModel, call: Call, inputs: dict[str, Any]) -> None:
        """Choose the slots for which the model computes logits, and replace the labels in ``inputs`` by theirs."""
        labels = call.labels
        if not (model.training and torch.is_grad_enabled() and labels is not None and labels.ndim == 2):
            return
        base = unwrapped(model.base_model)
        if not isinstance(base, ModelAroundEncoder):  # a wrapper
            return
        call.head_layout, call.head_base = self._layout_of(labels), base
        # M is rounded up, and the layout's unused entries get a label that the loss ignores.
        used = call.head_layout.indices_T < labels.numel()
        inputs["labels"] = call.head_layout.pick(labels).where(used, IGNORED)
        ran("labelled_head")

    def _layout_of(self, labels_BS: Tensor) -> Layout:
        known = known_batch().labelled
        if known is None or known.mask_BS.shape != labels_BS.shape:
            return self._count_and_lay_out(labels_BS)
        torch._assert_async((known.mask_BS == (labels_BS != IGNORED)).all(), _STALE)
        return known

    @run_eagerly(COUNTED_ON_HOST_MESSAGE)
    def _count_and_lay_out(self, labels_BS: Tensor) -> Layout:
        total = int((as_numpy(labels_BS) != IGNORED).sum())
        return lay_out(labels_BS != IGNORED, total, self.pad_to_multiple_of)


def labelled_heads(model: nn.Module) -> list[LabelledHead]:
    """The masked-LM heads in a model that compute labelled tokens only."""
    heads = [around.call_rules.labelled_head for around in models_around_encoders(model)]
    return [head for head in heads if head is not None]


def head_tokens(model: nn.Module, batch: Any) -> int | None:
    """Number of tokens for which the head computes logits in training; None for every token, and on a GPU if the batch
    has no count, which would synchronize."""
    if not hasattr(batch, "get") or not labelled_heads(model):
        return None
    if (counts := batch.get(ROW_LABELS)) is not None:
        return int(counts.numpy().sum())
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.device.type != "cpu":
        return None
    return int((as_numpy(labels) != IGNORED).sum())


def check_labelled_head(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that is not a ``...ForMaskedLM`` of transformers."""
    kind = stock_class(type(model))
    if not kind.__name__.endswith(_HEAD) or not kind.__module__.startswith("transformers.models."):
        raise ValueError(f"mlm_head='labelled' needs transformers' model with a masked-LM head, not {kind.__name__}")
