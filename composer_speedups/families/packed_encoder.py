"""Encoders of transformers that run on real tokens.

An encoder's class is derived from its own (see :func:`~..surgery.module_classes.derived_class`). It packs the tokens,
calls the original forward on one long row with variable-length attention, and puts the tokens back where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.families.packed_attention import IMPLEMENTATION
from composer_speedups.families.packed_tokens import (
    IGNORED,
    Plan,
    gather_tokens,
    make_plan,
    reads_padding,
    row_counts,
    scatter_tokens,
)

__all__ = ["Layout", "UnpaddedEncoder", "UnpaddedModel", "unpadded_encoders"]

_LABELLED = "unpadding: a padding slot has a label, and its loss would be another; give padding the label -100"
_STALE = "unpadding: the attention mask is not the one that was planned for; plan each batch, or none"

Layout = Plan | Literal["padded"]


class UnpaddedEncoder(nn.Module):
    """The methods of an encoder that runs on packed tokens; the class that it is derived from has the forward.

    Attributes:
        plans: Attention masks and the layouts of their batches; ``"padded"`` for a batch that must stay as it is. A
            forward pass looks for the very tensor that the model was called with. A mask of None stands for whatever
            mask of the plan's shape comes, whose values must then be the plan's; so does one of several texts a sample,
            (B, texts, S), whose rows the model gets as one dimension. A forward pass whose mask is not among them makes
            a plan of its own, for which a GPU's host waits.
        known_counts: Masks, and the :meth:`count` of their rows: for a forward pass over some rows of one of them.
        call_mask: The mask that the model around the encoder was called with, which transformers hands on as a copy.
        call_hidden_states: Whether the model around the encoder was called for all hidden states.
        call_labels: The labels that the outermost model was called with.
        by_token: The outermost model's head has a loss for each slot, and reads no mask.
        pad_to_multiple_of: The number of packed tokens is a multiple of it.
        reads_first: The model's head reads each row's first slot, padding or not.
        first_tokens_only: Nothing but each row's first token is read of the next result.
        ran: How the last forward pass went: ``"unpadded"``, ``"padded"``, or None before there was one.
        counted: Forward passes that had to count their tokens themselves.
        model_config: The configuration of the model around it.
        attention_before: The attention implementation that the model around it had.
        owner: Which :class:`Unpadding` changed it, by a number of its own; None for :func:`apply_unpadding`.
        padded_because: Reason and fix for a batch that :meth:`layout` leaves padded.
    """

    prefix = "Unpadded"
    plans: tuple[tuple[Tensor | None, Layout], ...] = ()
    known_counts: tuple[tuple[Tensor, Sequence[int]], ...] = ()
    call_mask: Tensor | None = None
    call_hidden_states: bool | None = None
    call_labels: Tensor | None = None
    by_token: bool = False
    pad_to_multiple_of: int = 64
    reads_first: bool = True
    first_tokens_only: bool = False
    ran: str | None = None
    counted: int = 0
    model_config: Any = None
    attention_before: str = "eager"
    owner: int | None = None
    padded_because = (
        "the head reads padding: rows begin with it, or it has a label",
        "pad on the right, and give padding the label -100",
    )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Hidden states (B, S, H) → transformers' output, its last hidden state (B, S, H) with zeros at padding.

        Left padded, and computed as the untouched model does: batches with a mask of pairs or cached keys, a
        request for hidden states or attention weights, and rows that begin with padding under a head that
        reads their first slot.
        """
        call_mask, self.call_mask = self.call_mask, None
        mask = self._mask_of(attention_mask, call_mask)
        plan = self._plan_of(hidden_states, mask, call_mask) if self._can_unpad(mask, kwargs) else None
        if plan is None:
            self.ran = "padded"
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        rows, width, hidden = hidden_states.shape
        packed = gather_tokens(hidden_states.reshape(rows * width, hidden), plan.indices_T).unsqueeze(0)
        if not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(packed, 1)  # for layers compiled one by one
        if self.first_tokens_only:
            kwargs["first_tokens_only"] = True  # a keyword, and so there too when a layer is recomputed
        output = self._packed(packed, plan, **kwargs)
        self.ran = "unpadded"
        last = scatter_tokens(output.last_hidden_state.squeeze(0), plan.indices_T, rows * width)
        output.last_hidden_state = last.view(rows, width, -1)
        return output

    def _mask_of(self, attention_mask: Tensor | None, call_mask: Tensor | None) -> Tensor | None:
        """The mask (B, S), from what the encoder and the model around it were given."""
        return attention_mask

    def _packed(self, packed: Tensor, plan: Plan, **kwargs: Any) -> Any:
        """The layers on packed tokens, (1, T, H) → transformers' output."""
        return super().forward(packed, attention_mask=None, unpadding=plan, **kwargs)

    def _attends_packed(self) -> bool:
        """Whether the layers would not take the packed tokens for one long row."""
        return bool(self.model_config._attn_implementation == IMPLEMENTATION)

    def _can_unpad(self, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
        config = self.model_config
        asked = ("output_attentions", "output_hidden_states")
        return (
            self._attends_packed()
            and (mask is None or mask.ndim == 2)
            and kwargs.get("encoder_hidden_states") is None
            and kwargs.get("past_key_values") is None
            and not any(kwargs.get(name, getattr(config, name, False)) for name in asked)
        )

    def _plan_of(self, hidden_states: Tensor, mask_BS: Tensor | None, call_mask: Tensor | None) -> Plan | None:
        """The plan made for the mask that the model was given, or else one made now; None to stay padded."""
        shape = hidden_states.shape[:2]
        for planned_for, layout in self.plans:
            if not (planned_for is None or planned_for is call_mask or _has_as_rows(planned_for, shape)):
                continue
            if isinstance(layout, str):
                return None
            planned = layout.mask_BS
            if planned.shape == shape:
                torch._assert_async((planned.all() if mask_BS is None else (planned == mask_BS.bool()).all()), _STALE)
                if planned_for is None:
                    self._check_labels(planned)
                return layout
        if mask_BS is not None and mask_BS.shape != shape:
            return None
        return self._own_plan(hidden_states, mask_BS, call_mask)

    @torch.compiler.disable  # it needs a number from the mask
    def _own_plan(self, hidden_states: Tensor, mask_BS: Tensor | None, call_mask: Tensor | None) -> Plan | None:
        counts = self._known_counts(call_mask)
        if counts is not None and call_mask is not None and not self.by_token:
            plan = self.layout(call_mask, counts)
            return plan if isinstance(plan, Plan) else None
        self.counted += 1
        if mask_BS is None:
            rows, width = hidden_states.shape[:2]
            mask_BS, counts = hidden_states.new_ones(rows, width, dtype=torch.bool), [width] * rows
        elif any(self.reads_padding(mask_BS, self.call_labels)):
            return None
        plan = self.layout(mask_BS, counts if counts is not None else self.count(mask_BS))
        return plan if isinstance(plan, Plan) else None

    def _known_counts(self, call_mask: Tensor | None) -> Sequence[int] | None:
        """Those of a mask that is some rows of a counted one, by where it lies in memory."""
        if call_mask is None or not call_mask.is_contiguous():
            return None
        for mask, counts in self.known_counts:
            width = mask.shape[-1]
            first = call_mask.storage_offset() - mask.storage_offset()
            rows = range(first // width, first // width + len(call_mask))
            same = call_mask.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr() and mask.is_contiguous()
            aligned = call_mask.shape[1:] == (width,) and first % width == 0
            if same and aligned and 0 <= rows.start <= rows.stop <= len(counts):
                return counts[rows.start : rows.stop]
        return None

    def reads_padding(self, mask_BS: Tensor, labels: Tensor | None) -> list[bool]:
        """Rows for which the head reads what is computed for padding; see :func:`.reads_padding`."""
        return reads_padding(mask_BS, labels, by_token=self.by_token, first_slot=self.reads_first)

    def _check_labels(self, mask_BS: Tensor) -> None:
        """Without waiting for the device, where nobody looked at the labels when the batch was planned."""
        labels = self.call_labels
        if self.by_token and labels is not None and labels.shape == mask_BS.shape:
            torch._assert_async(((labels == IGNORED) | mask_BS).all(), _LABELLED)

    def count(self, mask_BS: Tensor) -> list[int]:
        """Real tokens of each row, negative where something keeps it padded; see :func:`row_counts`."""
        return row_counts(mask_BS)

    def layout(self, mask_BS: Tensor, counts: Sequence[int]) -> Layout:
        """The plan of a batch on its device, from its :meth:`count`."""
        if self.reads_first and any(count < 0 for count in counts):
            return "padded"
        return make_plan(mask_BS, sum(map(abs, counts)), self.pad_to_multiple_of)


class UnpaddedModel(UnpaddedEncoder):
    """Of a family whose encoder is a model itself, which embeds the tokens too."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "_can_record_outputs"):  # a family's methods, not yet joined to its model
            return
        # transformers looks up by class what a model can record: hidden states and attention weights, in the padded
        # way. Assigning an item asks for a class's name in transformers 5.17 and for a model of it in 5.23; update
        # takes the name in both.
        modeling_utils._CAN_RECORD_REGISTRY.update({str(cls): cls._can_record_outputs})  # type: ignore[attr-defined]
        # save_pretrained writes the class's name into config.json: a model alone is to be loaded as what it was.
        cls.__name__ = cls.__name__.removeprefix(cls.prefix)

    def _output(self, last: Tensor, plan: Plan) -> Any:
        """The packed last hidden state, (1, T, H) → transformers' output, (B, S, H) with zeros at padding."""
        self.ran = "unpadded"
        padded = scatter_tokens(last.squeeze(0), plan.indices_T, plan.mask_BS.numel())
        return BaseModelOutput(last_hidden_state=padded.view(*plan.mask_BS.shape, -1))  # type: ignore[arg-type]


def _has_as_rows(mask: Tensor, shape: torch.Size) -> bool:
    return mask.ndim > 2 and mask.shape[-1] == shape[1] and mask.numel() == shape.numel()


def unpadded_encoders(model: nn.Module) -> list[UnpaddedEncoder]:
    """The encoders in a model that run on real tokens."""
    return [module for module in model.modules() if isinstance(module, UnpaddedEncoder)]
