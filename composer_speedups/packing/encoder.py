"""transformers encoders that compute only the real tokens of a padded batch.

The class of an encoder is derived from its original class (see :func:`~..packing.derived_classes.derived_class`). It
packs the tokens, calls the original forward on one long row with variable-length attention, and scatters the result to
the padded slots. The models around it (:class:`~.call.ModelAroundEncoder`) tell it about each call, and it lays
out the call's tokens before they embed them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.packing.call import Call, ModelAroundEncoder, call_of
from composer_speedups.packing.tokens import (
    COUNTED_ON_HOST,
    IGNORED,
    MULTIPLE,
    READS_PADDING,
    Plan,
    gather_tokens,
    make_plan,
    reads_padding,
    row_counts,
    run_eagerly,
    scatter_tokens,
)

__all__ = ["Layout", "PaddingReader", "Planned", "UnpaddedEncoder", "UnpaddedModel", "unpadded_encoders"]

_LABELLED = "unpadding: a padding position has a label, so the loss would differ; give padding the label -100"
_STALE = "unpadding: the attention mask differs from the planned one; call plan_unpadding for every batch or for none"

Layout = Plan | Literal["padded"]


class Planned(NamedTuple):
    """The layout of a batch that is known before its forward pass.

    Attributes:
        mask: The very tensor that the model will be called with, (B, S); or a mask (B, texts, S) whose first two
            dimensions the model receives merged; or None for any mask with the layout's values.
        labels: The labels that the layout was made with; None if they were not known.
        layout: ``"padded"`` for a batch that must stay padded.
    """

    mask: Tensor | None
    labels: Tensor | None
    layout: Layout


class PaddingReader:
    """Whether code outside of transformers' heads reads outputs at padding positions, as seen in its gradients.

    Attributes:
        reads: None before a gradient was observed.
    """

    def __init__(self, reads: bool | None = None) -> None:
        self.reads = reads

    def observe(self, mask_BS: Tensor, grad_BSH: Tensor) -> None:
        """A hook of the encoder's padded result: look for a gradient at padding positions. Synchronizes."""
        padding = ~mask_BS.bool()
        if not bool(padding.any()) or self.reads:
            return
        gradient = grad_BSH.detach()[padding]
        if not bool(gradient.isfinite().all()):  # infinity times a zero mask is NaN, as when fp16 overflows
            return
        found = bool(gradient.any())
        if found:
            warnings.warn(f"batches stay padded: {READS_PADDING}", UserWarning, stacklevel=2)
        # after the backward pass, which may first recompute this forward pass and needs the same layout
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._conclude, found))

    def _conclude(self, found: bool) -> None:
        self.reads = bool(self.reads) or found


class UnpaddedEncoder(nn.Module):
    """The methods of an encoder that runs on packed tokens. It is mixed into the encoder's original class, which
    defines the forward.

    Attributes:
        planned: Layouts of coming batches. One is used only for the mask and labels that it was made for, and its
            values are checked. A call without one makes its own, which synchronizes with the GPU.
        known_counts: Masks and the :meth:`count` of their rows, for forward passes over a subset of the rows.
        by_token: Whether the outermost model's head computes a loss per slot, without using the mask.
        pad_to_multiple_of: The number of packed tokens is rounded up to a multiple of it.
        reads_first: Whether the model's head reads each row's first slot, even if it is padding.
        padding_reader: What was observed of code that may read padding; None if none is expected to.
        ran: How the last forward pass ran: ``"unpadded"``, ``"padded"``, or None before the first one.
        counted: Number of forward passes that made a plan without known counts.
        model_config: The configuration of the surrounding model.
        owner: ID of the :class:`Unpadding` instance that changed it; None for :func:`apply_unpadding`.
        padded_because: Reason and fix for a batch that :meth:`layout` leaves padded.
    """

    prefix = "Unpadded"
    planned: tuple[Planned, ...] = ()
    known_counts: tuple[tuple[Tensor, Sequence[int]], ...] = ()
    by_token: bool = False
    pad_to_multiple_of: int = MULTIPLE
    reads_first: bool = True
    padding_reader: PaddingReader | None = None
    ran: str | None = None
    counted: int = 0
    model_config: Any = None
    owner: int | None = None
    padded_because = (
        "the head reads padding: rows begin with padding, or padding has a label",
        "pad on the right, and give padding the label -100",
    )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Hidden states (B, S, H) → transformers' output with the last hidden state (B, S, H), zeros at padding.

        Without a plan, which :meth:`plan_call` makes, it computes what the untouched encoder computes.
        """
        call = call_of(self)
        if call is None or call.plan is None:
            self.ran = "padded"
            return self._observed(call, super().forward(hidden_states, attention_mask=attention_mask, **kwargs))
        plan = call.plan
        rows, width, hidden = hidden_states.shape
        packed = gather_tokens(hidden_states.reshape(rows * width, hidden), plan.indices_T).unsqueeze(0)
        if not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(packed, 1)  # for layers compiled separately
        if call.first_tokens_only:
            # a keyword argument, so that it is also passed when a layer is recomputed
            kwargs["first_tokens_only"] = True
        output = self._packed(packed, plan, **kwargs)
        output.last_hidden_state = self._scattered(output.last_hidden_state, call)
        return output

    def _packed(self, packed: Tensor, plan: Plan, **kwargs: Any) -> Any:
        """Run the layers on packed tokens, (1, T, H) → transformers' output."""
        return super().forward(packed, attention_mask=None, unpadding=plan, **kwargs)

    def _scattered(self, packed: Tensor, call: Call) -> Tensor:
        """The packed last hidden state, (1, T, H) → (B, S, H), zeros at padding."""
        assert call.plan is not None
        self.ran = "unpadded"
        rows, width = call.plan.mask_BS.shape
        slots = scatter_tokens(packed.squeeze(0), call.plan.indices_T, rows * width, guarded=call.guarded)
        return slots.view(rows, width, -1)

    def _observed(self, call: Call | None, output: Any) -> Any:
        """The padded result, whose gradient will show whether padding is read, if that is unknown."""
        if call is not None and call.observed and call.mask is not None and self.padding_reader is not None:
            last = output[0]
            if not last.requires_grad:  # the encoder is frozen
                if not any(p.requires_grad for p in call.outermost.parameters()):
                    return output  # which the caller may use as a tensor without a gradient
                last.requires_grad_()
            last.register_hook(functools.partial(self.padding_reader.observe, call.mask))
        return output

    def plan_call(self, call: Call, inputs: dict[str, Any]) -> dict[str, Any]:
        """Lay out the tokens of a call of the model directly around the encoder, from its arguments by name.

        A batch stays padded if it has a query-key mask or cached keys, if hidden states or attention weights are
        requested, or if padding is read: by the head (:attr:`padded_because`) or by unknown code.

        Returns:
            The arguments to call the model's own forward with.
        """
        ids = inputs.get("input_ids")
        values, mask = inputs.get("inputs_embeds") if ids is None else ids, inputs.get("attention_mask")
        call.mask, call.guarded = mask if isinstance(mask, Tensor) else None, False
        if not call.padded and isinstance(values, Tensor) and self._can_unpad(mask, inputs) and self._may_pack(call):
            call.plan = self._plan_of(values, call)
        return inputs if call.plan is None else self._inputs_of_packed(inputs, call.plan)

    def _inputs_of_packed(self, inputs: dict[str, Any], plan: Plan) -> dict[str, Any]:
        """A mask in four dimensions, which transformers passes on as it is instead of one per pair of tokens."""
        return {**inputs, "attention_mask": plan.mask_BS[:, None, None, :]}

    def _can_unpad(self, mask: Any, inputs: dict[str, Any]) -> bool:
        config = self.model_config
        return (
            (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))
            and inputs.get("encoder_hidden_states") is None
            and inputs.get("past_key_values") is None
            and (inputs.get("input_ids") is None) != (inputs.get("inputs_embeds") is None)
            and not _requested("output_attentions", inputs, config)
            and not _requested("output_hidden_states", inputs, config)
        )

    def _may_pack(self, call: Call) -> bool:
        """Whether unknown code may get zeros at padding. Gradients show whether it reads them."""
        reader = self.padding_reader
        unknown = call.unknown_reader or (self.by_token and call.labels is None)
        if reader is None or not unknown or call.mask is None or call.unobserved:
            return True
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and reader.reads is None:
            call.observed = True
            return False
        call.guarded = True
        return not reader.reads

    def _plan_of(self, values: Tensor, call: Call) -> Plan | None:
        """The plan for a call's mask, or else a new one; None to stay padded."""
        shape, mask_BS = values.shape[:2], call.mask
        for mask, labels, layout in self.planned:
            if not (mask is None or mask is mask_BS or _has_as_rows(mask, shape)):
                continue
            if self.by_token and labels is not None and call.labels is not None and labels is not call.labels:
                continue  # other labels may be at padding positions
            if isinstance(layout, str):
                return None
            planned = layout.mask_BS
            if planned.shape == shape:
                torch._assert_async((planned.all() if mask_BS is None else (planned == mask_BS.bool()).all()), _STALE)
                self._check_labels(planned, call.labels)
                return layout
        if mask_BS is not None and mask_BS.shape != shape:
            return None
        return self._own_plan(values, mask_BS, call.labels)

    @run_eagerly(COUNTED_ON_HOST)
    def _own_plan(self, values: Tensor, mask_BS: Tensor | None, labels: Tensor | None) -> Plan | None:
        counts = self._known_counts(mask_BS)
        if counts is not None and mask_BS is not None and (labels is None or not self.by_token):
            plan = self.layout(mask_BS, counts)
            return plan if isinstance(plan, Plan) else None
        self.counted += 1
        if mask_BS is None:
            rows, width = values.shape[:2]
            mask_BS, counts = values.new_ones(rows, width, dtype=torch.bool), [width] * rows
        elif any(self.reads_padding(mask_BS, labels)):
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

    def _check_labels(self, mask_BS: Tensor, labels: Tensor | None) -> None:
        """Check, without synchronizing, that no label of a planned batch is at a padding position."""
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


class UnpaddedModel(UnpaddedEncoder, ModelAroundEncoder):
    """An unpadded encoder that is itself a model and also embeds the tokens."""

    prefix = "Unpadded"

    def _inputs_of_packed(self, inputs: dict[str, Any], plan: Plan) -> dict[str, Any]:
        return inputs  # it packs them itself

    def _output(self, last: Tensor, call: Call) -> Any:
        """The packed last hidden state, (1, T, H) → transformers' output, (B, S, H) with zeros at padding."""
        return BaseModelOutput(last_hidden_state=self._scattered(last, call))  # type: ignore[arg-type]


def _requested(name: str, inputs: dict[str, Any], config: Any) -> bool:
    value = inputs.get(name)
    return bool(getattr(config, name, False) if value is None else value)


def _has_as_rows(mask: Tensor, shape: torch.Size) -> bool:
    return mask.ndim > 2 and mask.shape[-1] == shape[1] and mask.numel() == shape.numel()


def unpadded_encoders(model: nn.Module) -> list[UnpaddedEncoder]:
    """The unpadded encoders in a model."""
    return [module for module in model.modules() if isinstance(module, UnpaddedEncoder)]
