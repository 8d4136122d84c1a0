"""transformers encoders that compute only the real tokens of a padded batch.

The class of an encoder is derived from its original class (see :func:`~..surgery.module_classes.derived_class`). It
packs the tokens, calls the original forward on one long row with variable-length attention, and scatters the result to
the padded slots.
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

_LABELLED = "unpadding: a padding position has a label, so the loss would differ; give padding the label -100"
_STALE = "unpadding: the attention mask differs from the planned one; call plan_unpadding for every batch or for none"

Layout = Plan | Literal["padded"]


class UnpaddedEncoder(nn.Module):
    """The methods of an encoder that runs on packed tokens. It is mixed into the encoder's original class, which
    defines the forward.

    Attributes:
        plans: Pairs of an attention mask and the layout of its batch, ``"padded"`` for one that must stay padded. A
            pair matches if its mask is the very tensor that the model was called with, if it is None, or if it is a
            mask (B, texts, S) whose first two dimensions the model received merged. A plan is used only if its shape
            matches, and its values are then checked; ``"padded"`` needs no matching shape. Without a match, the forward
            pass makes its own plan, which synchronizes with the GPU.
        known_counts: Masks and the :meth:`count` of their rows, for forward passes over a subset of the rows.
        call_mask: The mask that the surrounding model was called with; transformers passes on a copy.
        call_hidden_states: Whether the surrounding model's caller requested all hidden states; None if the encoder was
            called directly.
        call_labels: The labels that the outermost model was called with.
        by_token: Whether the outermost model's head computes a loss per slot, without using the mask.
        pad_to_multiple_of: The number of packed tokens is rounded up to a multiple of it.
        reads_first: Whether the model's head reads each row's first slot, even if it is padding.
        first_tokens_only: Whether only each row's first token of the next forward pass's output is read.
        ran: How the last forward pass ran: ``"unpadded"``, ``"padded"``, or None before the first one.
        counted: Number of forward passes that made a plan without known counts.
        model_config: The configuration of the surrounding model.
        attention_before: The previous attention implementation of the surrounding model.
        owner: ID of the :class:`Unpadding` instance that changed it; None for :func:`apply_unpadding`.
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
        "the head reads padding: rows begin with padding, or padding has a label",
        "pad on the right, and give padding the label -100",
    )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Hidden states (B, S, H) → transformers' output with the last hidden state (B, S, H), zeros at padding.

        A batch stays padded, and is computed as in the untouched model, if it has a query-key mask or cached keys, if
        hidden states or attention weights are requested, if the head reads padding (:attr:`padded_because`), or if the
        model's attention implementation was changed.
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
            torch._dynamo.maybe_mark_dynamic(packed, 1)  # for layers compiled separately
        if self.first_tokens_only:
            # a keyword argument, so that it is also passed when a layer is recomputed
            kwargs["first_tokens_only"] = True
        output = self._packed(packed, plan, **kwargs)
        self.ran = "unpadded"
        last = scatter_tokens(output.last_hidden_state.squeeze(0), plan.indices_T, rows * width)
        output.last_hidden_state = last.view(rows, width, -1)
        return output

    def _mask_of(self, attention_mask: Tensor | None, call_mask: Tensor | None) -> Tensor | None:
        """The mask (B, S), from the arguments of the encoder and of the surrounding model."""
        return attention_mask

    def _packed(self, packed: Tensor, plan: Plan, **kwargs: Any) -> Any:
        """Run the layers on packed tokens, (1, T, H) → transformers' output."""
        return super().forward(packed, attention_mask=None, unpadding=plan, **kwargs)

    def _attends_packed(self) -> bool:
        """Whether attention respects the boundaries between packed rows."""
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
        """The plan for the mask that the model was called with, or else a new one; None to stay padded."""
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

    @torch.compiler.disable  # reads the number of tokens on the host
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
        """The counts of a mask that is a slice of a counted mask's rows, recognized by its memory address."""
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
        """Rows for which the head reads outputs at padding positions; see :func:`.reads_padding`."""
        return reads_padding(mask_BS, labels, by_token=self.by_token, first_slot=self.reads_first)

    def _check_labels(self, mask_BS: Tensor) -> None:
        """Check labels without synchronizing, if they were not checked when the batch was planned."""
        labels = self.call_labels
        if self.by_token and labels is not None and labels.shape == mask_BS.shape:
            torch._assert_async(((labels == IGNORED) | mask_BS).all(), _LABELLED)

    def count(self, mask_BS: Tensor) -> list[int]:
        """Real tokens of each row, negative for a row that may make the batch stay padded; see :func:`row_counts`."""
        return row_counts(mask_BS)

    def layout(self, mask_BS: Tensor, counts: Sequence[int]) -> Layout:
        """The plan of a batch on its device, from its :meth:`count`."""
        if self.reads_first and any(count < 0 for count in counts):
            return "padded"
        return make_plan(mask_BS, sum(map(abs, counts)), self.pad_to_multiple_of)


class UnpaddedModel(UnpaddedEncoder):
    """An unpadded encoder that is itself a model and also embeds the tokens."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "_can_record_outputs"):  # a family's mixin, not yet combined with a class of transformers
            return
        # transformers looks up by class which outputs a model can record: hidden states and attention weights, which
        # are needed when a batch runs padded. Item assignment expects a class's name in transformers 5.17 and a model
        # in 5.23; update() accepts the name in both.
        modeling_utils._CAN_RECORD_REGISTRY.update({str(cls): cls._can_record_outputs})  # type: ignore[attr-defined]
        # save_pretrained writes the class's name to config.json, and the saved model must load as its original class.
        cls.__name__ = cls.__name__.removeprefix(cls.prefix)

    def _output(self, last: Tensor, plan: Plan) -> Any:
        """The packed last hidden state, (1, T, H) → transformers' output, (B, S, H) with zeros at padding."""
        self.ran = "unpadded"
        padded = scatter_tokens(last.squeeze(0), plan.indices_T, plan.mask_BS.numel())
        return BaseModelOutput(last_hidden_state=padded.view(*plan.mask_BS.shape, -1))  # type: ignore[arg-type]


def _has_as_rows(mask: Tensor, shape: torch.Size) -> bool:
    return mask.ndim > 2 and mask.shape[-1] == shape[1] and mask.numel() == shape.numel()


def unpadded_encoders(model: nn.Module) -> list[UnpaddedEncoder]:
    """The unpadded encoders in a model."""
    return [module for module in model.modules() if isinstance(module, UnpaddedEncoder)]
