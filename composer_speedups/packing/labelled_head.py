"""Compute a masked-LM head only for the tokens that have a label.

The loss reads no other logits. ModernBERT's config has this as ``sparse_prediction``; this module does it for every
supported family, and without a synchronization if the labels were counted on the host.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from composer_speedups.packing.call import Call, ModelAroundEncoder
from composer_speedups.packing.derived_classes import stock_class
from composer_speedups.packing.tokens import COUNTED_ON_HOST, IGNORED, MULTIPLE, Plan, as_numpy, make_plan, run_eagerly

__all__ = [
    "LabelledHead",
    "MLMHead",
    "check_labelled_head",
    "count_labels",
    "head_tokens",
    "labelled_heads",
    "plan_labels",
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
        plan: The labelled tokens of the next call, from :func:`plan_labels`. Without one, the call counts them, which
            synchronizes with the GPU.
        ran: Whether a call computed the head for labelled tokens only.
    """

    def __init__(self, pad_to_multiple_of: int = MULTIPLE) -> None:
        self.pad_to_multiple_of = pad_to_multiple_of
        self.plan: Plan | None = None
        self.ran = False

    def select(self, model: PreTrainedModel, call: Call, inputs: dict[str, Any]) -> None:
        """Choose the slots of a call of the masked-LM model, and replace its labels in ``inputs`` by theirs."""
        labels = call.labels
        if not (model.training and torch.is_grad_enabled() and labels is not None and labels.ndim == 2):
            return
        indices, slots = self._plan_of(labels).indices_T, labels.numel()
        call.head_slots, call.head_base = indices, model.base_model
        selected = labels.flatten().index_select(0, indices.clamp(max=slots - 1))
        inputs["labels"] = selected.where(indices < slots, IGNORED).unsqueeze(0)  # the plan has unused entries
        self.ran = True

    def _plan_of(self, labels_BS: Tensor) -> Plan:
        if self.plan is None or self.plan.mask_BS.shape != labels_BS.shape:
            return self._own_plan(labels_BS)
        torch._assert_async((self.plan.mask_BS == (labels_BS != IGNORED)).all(), _STALE)
        return self.plan

    @run_eagerly(COUNTED_ON_HOST)
    def _own_plan(self, labels_BS: Tensor) -> Plan:
        return plan_labels(labels_BS, sum(count_labels(labels_BS)), self.pad_to_multiple_of)


def count_labels(labels_BS: Tensor) -> list[int]:
    """Labelled tokens of each row, on the host. Synchronizes if the labels are on a GPU."""
    return [int(count) for count in (as_numpy(labels_BS) != IGNORED).sum(-1)]


def plan_labels(labels_BS: Tensor, total: int, pad_to_multiple_of: int) -> Plan:
    """Plan which tokens the head computes, from labels on its device and the number of labelled tokens."""
    return make_plan(labels_BS != IGNORED, total, pad_to_multiple_of)


def labelled_heads(model: nn.Module) -> list[LabelledHead]:
    """The masked-LM heads in a model that compute labelled tokens only."""
    models = (module for module in model.modules() if isinstance(module, ModelAroundEncoder))
    return [model.call_rules.labelled_head for model in models if model.call_rules.labelled_head is not None]


def head_tokens(model: nn.Module, batch: Any) -> int | None:
    """Number of tokens for which the head computes logits in training; None for every token.

    Counts labels on the CPU only; on a GPU that would synchronize.
    """
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, Tensor) or labels.device.type != "cpu" or not labelled_heads(model):
        return None
    return sum(count_labels(labels))


def check_labelled_head(model: PreTrainedModel) -> None:
    """Check the class of a model.

    Raises:
        ValueError: It is not a ``...ForMaskedLM`` of transformers.
    """
    kind = stock_class(type(model)) if isinstance(model, ModelAroundEncoder) else type(model)
    if not kind.__name__.endswith(_HEAD) or not kind.__module__.startswith("transformers.models."):
        raise ValueError(f"mlm_head='labelled' needs transformers' model with a masked-LM head, not {kind.__name__}")
