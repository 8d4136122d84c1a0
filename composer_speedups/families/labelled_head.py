"""Compute a masked-LM head only for the tokens that have a label.

The loss reads no other logits. ModernBERT's config has this as ``sparse_prediction``; this module does it for every
supported family, and without a synchronization if the labels were counted on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from composer_speedups.families.packed_tokens import IGNORED, Plan, gather_tokens, make_plan

if TYPE_CHECKING:
    from composer_speedups.families.packed_encoder import UnpaddedEncoder

__all__ = [
    "LabelledHead",
    "MLMHead",
    "check_labelled_head",
    "count_labels",
    "head_tokens",
    "install_labelled_head",
    "labelled_heads",
    "plan_labels",
]

MLMHead = Literal["all", "labelled"]
_HEAD = "ForMaskedLM"
_STALE = "unpadding: the labels differ from the planned ones; plan every batch or none"


class LabelledHead:
    """Hooks of a masked-LM model and of the base model inside it.

    In training calls with labels (B, S), the head gets the hidden states of the labelled tokens, (1, M, H), and the
    loss gets their labels, (1, M). The logits are then (1, M, vocabulary). All other calls are unchanged.

    Attributes:
        encoder: The unpadded encoder inside.
        plan: The labelled tokens of the next call, from :func:`plan_labels`. Without one, the call counts them, which
            synchronizes with the GPU.
        ran: Whether a call computed the head for labelled tokens only.
    """

    def __init__(self, encoder: UnpaddedEncoder) -> None:
        self.encoder = encoder
        self.plan: Plan | None = None
        self.ran = False
        self._indices: Tensor | None = None

    def select_labels(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward pre-hook of the masked-LM model."""
        labels, self._indices = kwargs.get("labels"), None
        if not (model.training and torch.is_grad_enabled() and isinstance(labels, Tensor) and labels.ndim == 2):
            return None
        indices, slots = self._plan_of(labels).indices_T, labels.numel()
        self._indices = indices
        selected = labels.flatten().index_select(0, indices.clamp(max=slots - 1))
        selected = selected.where(indices < slots, IGNORED)  # unused entries of the plan
        return args, {**kwargs, "labels": selected.unsqueeze(0)}

    def select_hidden_states(self, base: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook of the base model."""
        if self._indices is None:
            return None
        hidden = output[0]
        selected = gather_tokens(hidden.flatten(0, 1), self._indices).unsqueeze(0)
        self.ran = True
        if isinstance(output, tuple):
            return (selected, *output[1:])
        output.last_hidden_state = selected
        return output

    def forget(self, model: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the masked-LM model, which is also called if its forward raises."""
        self._indices = None

    def _plan_of(self, labels_BS: Tensor) -> Plan:
        if self.plan is None or self.plan.mask_BS.shape != labels_BS.shape:
            return self._own_plan(labels_BS)
        torch._assert_async((self.plan.mask_BS == (labels_BS != IGNORED)).all(), _STALE)
        return self.plan

    @torch.compiler.disable  # reads the number of labelled tokens on the host
    def _own_plan(self, labels_BS: Tensor) -> Plan:
        return plan_labels(labels_BS, sum(count_labels(labels_BS)), self.encoder.pad_to_multiple_of)


def count_labels(labels_BS: Tensor) -> list[int]:
    """Labelled tokens of each row, on the host. Synchronizes if the labels are on a GPU."""
    # Not torch, which would wake all its threads for a few thousand numbers.
    return [int(count) for count in (labels_BS.detach().cpu().numpy() != IGNORED).sum(-1)]


def plan_labels(labels_BS: Tensor, total: int, pad_to_multiple_of: int) -> Plan:
    """Plan which tokens the head computes, from labels on its device and the number of labelled tokens."""
    return make_plan(labels_BS != IGNORED, total, pad_to_multiple_of)


def labelled_heads(model: nn.Module) -> list[LabelledHead]:
    """The hooks of a model's masked-LM heads that compute only labelled tokens."""
    return [head for module in model.modules() for head in _heads_of(module)]


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
    kind = type(model)
    if not kind.__name__.endswith(_HEAD) or not kind.__module__.startswith("transformers.models."):
        raise ValueError(f"mlm_head='labelled' needs transformers' model with a masked-LM head, not {kind.__name__}")


def install_labelled_head(model: PreTrainedModel, encoder: UnpaddedEncoder) -> None:
    """Make a model's head compute labelled tokens only; a second call changes nothing."""
    if any(head.encoder is encoder for head in _heads_of(model)):
        return
    head = LabelledHead(encoder)
    model.register_forward_pre_hook(head.select_labels, with_kwargs=True)
    model.register_forward_hook(head.forget, always_call=True)
    model.base_model.register_forward_hook(head.select_hidden_states)


def _heads_of(module: nn.Module) -> list[LabelledHead]:
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, LabelledHead)]
