"""Decide for each call of an encoder whether its batch is packed, and lay out the tokens.

:meth:`Packing.plan_call` makes the :class:`~.call.CallPlan` that the encoder's forward follows. Layouts of coming
batches may be made beforehand, from counts on the host; a call without one counts its tokens itself.

Shapes: B rows, S slots per row, H hidden units.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_speedups.packing.call import Call, CallPlan
from composer_speedups.packing.tokens import (
    COUNTED_ON_HOST_MESSAGE,
    IGNORED,
    READS_PADDING_MESSAGE,
    STAYS_PADDED,
    TokenLayout,
    lay_out_tokens,
    reads_padding,
    row_counts,
    rows_with_holes,
    run_eagerly,
)

__all__ = ["Packing", "PaddingReader", "PlannedBatch"]

_LABELLED = "unpadding: a padding position has a label, so the loss would differ; give padding the label -100"
_STALE = "unpadding: the attention mask differs from the planned one; call plan_unpadding for every batch or for none"


class PlannedBatch(NamedTuple):
    """The layout of a batch that is known before its forward pass.

    Attributes:
        mask: The tensor that the model will be called with, (B, S). Or one (B, texts, S), of which the encoder gets a
            view, (B·texts, S).
        labels: The labels that the layout was made with; None if they were not known.
        layout: None for a batch that must stay padded.
        by_values: Whether the model may be called with another tensor that has the values of ``mask``.
    """

    mask: Tensor
    labels: Tensor | None
    layout: TokenLayout | None
    by_values: bool = False


class PaddingReader:
    """Finds out by gradients whether code outside of transformers' heads reads outputs at padding positions.

    Attributes:
        reads: Whether it does; None before a gradient was observed.
    """

    def __init__(self, reads: bool | None = None) -> None:
        self.reads = reads

    def watch(self, output: Any, call: Call, mask_BS: Tensor) -> None:
        """Observe the gradient of an encoder's padded result."""
        last = output[0]
        if not last.requires_grad:  # the encoder is frozen
            if not any(p.requires_grad for p in call.outermost.parameters()):
                return  # the caller may use the output as a tensor without a gradient
            last.requires_grad_()
        last.register_hook(functools.partial(self._observe, mask_BS))

    def _observe(self, mask_BS: Tensor, grad_BSH: Tensor) -> None:
        """Look for a gradient at padding positions. Synchronizes."""
        padding = ~mask_BS.bool()
        if not bool(padding.any()) or self.reads:
            return
        gradient = grad_BSH.detach()[padding]
        if not bool(gradient.isfinite().all()):  # infinity times a zero mask is NaN, as when fp16 overflows
            return
        reads = bool(gradient.any())
        if reads:
            warnings.warn(f"batches stay padded: {READS_PADDING_MESSAGE}", UserWarning, stacklevel=2)
        # Only after the backward pass: gradient checkpointing may still recompute this forward pass, which needs the
        # layout that it had.
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._conclude, reads))

    def _conclude(self, reads: bool) -> None:
        self.reads = bool(self.reads) or reads


@dataclass
class Packing:
    """How the batches of one encoder are packed.

    Attributes:
        config: The configuration of the model directly around the encoder.
        pad_to_multiple_of: The number of packed tokens is rounded up to a multiple of it.
        max_width_with_holes: A batch with more slots per row than this stays padded if one of its rows has padding
            between real tokens; None if holes do not matter.
        head_has_token_loss: Whether the outermost model's head computes a loss per slot, without using the mask.
        head_reads_first_slot: Whether the model's head reads each row's first slot, even if it is padding.
        padding_reader: Observes whether code that is not known reads padding; None to pack its batches unobserved.
        owner: ID of the object that changed the encoder and will restore it; None if a function changed it.
        planned, known_counts: See :meth:`plan`.
        counted: Number of calls that counted the tokens of their mask.
    """

    config: Any
    pad_to_multiple_of: int
    max_width_with_holes: int | None = None
    head_has_token_loss: bool = False
    head_reads_first_slot: bool = False
    padding_reader: PaddingReader | None = None
    owner: int | None = None
    planned: tuple[PlannedBatch, ...] = ()
    known_counts: tuple[tuple[Tensor, Sequence[int]], ...] = ()
    counted: int = 0

    def plan(
        self, planned: Iterable[PlannedBatch] = (), known_counts: Iterable[tuple[Tensor, Sequence[int]]] = ()
    ) -> None:
        """Replace the plans for the coming calls; without arguments, forget them.

        Args:
            planned: A call takes the layout that was made for its mask and labels, and checks that their values did not
                change. A call without one counts its tokens, which synchronizes with the GPU.
            known_counts: Masks (B, texts, S) and the :meth:`count` of their rows. A call whose mask is a view of some
                of these rows takes their counts.
        """
        self.planned, self.known_counts = tuple(planned), tuple(known_counts)

    def count(self, mask_BS: Tensor, labels: Tensor | None = None, tokens: Sequence[int] | None = None) -> list[int]:
        """Real tokens of each row, on the host; :data:`.STAYS_PADDED` for a row that makes its batch stay padded.

        A row does so if the head reads its padding (see :func:`.reads_padding`), or if it has holes that matter.
        Synchronizes if the mask or the labels are on a GPU. ``tokens`` is the mask's :func:`.row_counts`, if they are
        known.
        """
        mask_BS = mask_BS.cpu()
        padded = reads_padding(
            mask_BS,
            labels,
            head_has_token_loss=self.head_has_token_loss,
            head_reads_first_slot=self.head_reads_first_slot,
        )
        if self.max_width_with_holes is not None and mask_BS.shape[1] > self.max_width_with_holes:
            padded = [reads or hole for reads, hole in zip(padded, rows_with_holes(mask_BS), strict=True)]
        counts = row_counts(mask_BS) if tokens is None else tokens
        return [STAYS_PADDED if row_padded else count for count, row_padded in zip(counts, padded, strict=True)]

    def layout(self, mask_BS: Tensor, counts: Sequence[int]) -> TokenLayout | None:
        """The layout of a batch on its device, from its :meth:`count`; None for a batch that stays padded, as an empty
        one does."""
        stays_padded = STAYS_PADDED in counts or not counts
        return None if stays_padded else lay_out_tokens(mask_BS, sum(counts), self.pad_to_multiple_of)

    @property
    def padded_because(self) -> tuple[str, str]:
        """Reason and fix for a batch that :meth:`layout` leaves padded."""
        if self.max_width_with_holes is None:
            return (
                "the head reads padding: rows begin with padding, or padding has a label",
                "pad on the right, and give padding the label -100",
            )
        return (
            "the head reads padding (rows begin with padding, or padding has a label), or rows have holes, which "
            "change the distances between packed tokens",
            "pad on the right, without holes, and give padding the label -100",
        )

    def plan_call(self, call: Call, inputs: dict[str, Any]) -> CallPlan:
        """Plan a call of the model directly around the encoder, from its arguments by name.

        A batch stays padded if it has a query-key mask or cached keys, if hidden states or attention weights are
        requested, or if padding is read: by the head (:attr:`padded_because`) or by unknown code.
        """
        ids = inputs.get("input_ids")
        values, mask = inputs.get("inputs_embeds") if ids is None else ids, inputs.get("attention_mask")
        if call.padded or not isinstance(values, Tensor) or not self._can_pack(mask, inputs):
            return CallPlan()
        reader = self.padding_reader
        reader_is_unknown = call.unknown_reader or (self.head_has_token_loss and call.labels is None)
        guarded = False
        if reader is not None and reader_is_unknown and mask is not None and not call.trust_unknown_reader:
            guarded = True
            if reader.reads:
                return CallPlan()
            # Without gradients, or in compiled code, nothing can be observed, and the batch would stay padded in every
            # call. It is packed instead: a backward pass through it is guarded, and apply_unpadding documents zeros.
            if reader.reads is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                return CallPlan(observe=functools.partial(reader.watch, call=call, mask_BS=mask))
        return CallPlan(self._layout_of(values, mask, call.labels), call.first_tokens_only, guarded)

    def _can_pack(self, mask: Any, inputs: dict[str, Any]) -> bool:
        return (
            (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))
            and not getattr(self.config, "is_decoder", False)  # which models look up in each call
            and inputs.get("encoder_hidden_states") is None
            and inputs.get("past_key_values") is None
            and (inputs.get("input_ids") is None) != (inputs.get("inputs_embeds") is None)
            and not self._requested("output_attentions", inputs)
            and not self._requested("output_hidden_states", inputs)
        )

    def _requested(self, name: str, inputs: dict[str, Any]) -> bool:
        value = inputs.get(name)
        return bool(getattr(self.config, name, False) if value is None else value)

    def _layout_of(self, values: Tensor, mask_BS: Tensor | None, labels: Tensor | None) -> TokenLayout | None:
        """The layout planned for a call's mask, or else a new one; None to stay padded."""
        shape = values.shape[:2]
        for planned, planned_labels, layout, by_values in self._planned_for(mask_BS, shape):
            if (
                self.head_has_token_loss
                and planned_labels is not None
                and labels is not None
                and planned_labels is not labels
            ):
                continue  # other labels may be at padding positions
            if layout is None and not by_values:
                return None
            planned_BS = planned if layout is None else layout.mask_BS
            if planned_BS.shape == shape:
                expected = planned_BS.all() if mask_BS is None else (planned_BS == mask_BS.bool()).all()
                torch._assert_async(expected, _STALE)
                if layout is not None:
                    self._check_labels(planned_BS, labels)
                return layout
        if mask_BS is not None and mask_BS.shape != shape:
            return None
        return self._count_and_lay_out(values, mask_BS, labels)

    def _planned_for(self, mask_BS: Tensor | None, shape: torch.Size) -> list[PlannedBatch]:
        """The planned batches whose mask a call has: as the same tensor, or as a view of it with all texts as rows."""
        same = [b for b in self.planned if b.mask is mask_BS or (b.by_values and b.mask.shape == shape)]
        if same or mask_BS is None:
            return same
        texts = [(batch, batch.mask) for batch in self.planned if batch.mask.ndim > 2]
        if not torch.compiler.is_compiling():
            return [batch for batch, mask in texts if _rows_of(mask_BS, mask) == slice(0, mask.shape[:-1].numel())]
        # torch.compile cannot trace _rows_of. A mask of the right size is taken, if there is only one.
        fitting = [b for b, mask in texts if mask.shape[-1] == shape[1] and mask.numel() == shape.numel()]
        return fitting if len(fitting) == 1 else []

    def _check_labels(self, mask_BS: Tensor, labels: Tensor | None) -> None:
        """Check, without synchronizing, that no label of a planned batch is at a padding position."""
        if self.head_has_token_loss and labels is not None and labels.shape == mask_BS.shape:
            torch._assert_async(((labels == IGNORED) | mask_BS).all(), _LABELLED)

    @run_eagerly(COUNTED_ON_HOST_MESSAGE)
    def _count_and_lay_out(self, values: Tensor, mask_BS: Tensor | None, labels: Tensor | None) -> TokenLayout | None:
        counts: Sequence[int] | None
        if mask_BS is None:
            mask_BS = values.new_ones(values.shape[:2], dtype=torch.bool)
            counts = [mask_BS.shape[1]] * len(mask_BS)
        else:
            labels_matter = labels is not None and self.head_has_token_loss  # known counts are of the mask alone
            counts = None if labels_matter else self._known_counts_of(mask_BS)
            if counts is None:
                self.counted += 1
                counts = self.count(mask_BS, labels)
        return self.layout(mask_BS, counts)

    def _known_counts_of(self, mask_BS: Tensor) -> Sequence[int] | None:
        """The counts of a call's mask, if it is a view of rows of a counted one, as that of a chunk of a batch is."""
        for whole, counts in self.known_counts:
            rows = _rows_of(mask_BS, whole)
            if rows is not None:
                return counts[rows]
        return None


def _rows_of(view_BS: Tensor, whole: Tensor) -> slice | None:
    """The rows of a mask (…, S) that another mask is a view of; None if it is not such a view."""
    width = whole.shape[-1]
    base = whole if whole._base is None else whole._base
    first, within_row = divmod(int(view_BS.storage_offset()) - int(whole.storage_offset()), width)
    is_view = view_BS._base is base and view_BS.is_contiguous() and whole.is_contiguous()
    inside = view_BS.shape[1] == width and within_row == 0 and 0 <= first <= whole.numel() // width - len(view_BS)
    return slice(first, first + len(view_BS)) if is_view and inside else None
