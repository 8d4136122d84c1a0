"""Decide for each call of an encoder whether its batch is packed, and lay out the tokens.

:meth:`Packing.plan_call` makes the :class:`~.call.CallPlan` that the encoder's forward follows. A call whose tokens
were counted on the host takes their layout; any other call counts its tokens itself.

Shapes: B rows, S slots per row, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_speedups.kernels.host import ran
from composer_speedups.packing.call import Call, CallPlan, known_batch
from composer_speedups.packing.layout import COUNTED_ON_HOST_MESSAGE, Layout, lay_out, run_eagerly
from composer_speedups.packing.rows import IGNORED, STAYS_PADDED, RowRules
from composer_speedups.packing.untouched import packs_everything

READS_PADDING = (
    "unpadding: the loss reads outputs at padding positions, which would be zeros; give padding the label -100, pool "
    "with the attention mask, or, if padding makes no difference, set check='never'"
)
_LABELLED = "unpadding: a padding position has a label, so the loss would differ; give padding the label -100"
_CHANGED = "unpadding: the attention mask changed after its tokens were counted; change batches before they are moved"


@dataclass
class Packing:
    """How the batches of one encoder are packed.

    Attributes:
        config: The configuration of the model directly around the encoder.
        pad_to_multiple_of: The number of packed tokens is rounded up to a multiple of it.
        rules: Which rows stay padded, with their batch.
        reads_padding: Whether code that is not known reads the result at padding positions; None until the gradients of
            a batch with padding have shown that it does not.
    """

    config: Any
    pad_to_multiple_of: int
    rules: RowRules
    reads_padding: bool | None = False

    def plan_call(self, call: Call, inputs: dict[str, Any]) -> CallPlan:
        """Plan a call of the model directly around the encoder, from its arguments by name.

        A batch stays padded if it has a query-key mask or cached keys, if hidden states or attention weights are
        requested, if the head reads padding (:class:`.RowRules`), or until it is known whether other code reads it.
        """
        ids = inputs.get("input_ids")
        values, mask = inputs.get("inputs_embeds") if ids is None else ids, inputs.get("attention_mask")
        if call.padded or not isinstance(values, Tensor) or not self._can_pack(mask, inputs):
            return CallPlan()
        unknown = call.unknown_reader or (self.rules.head_has_token_loss and call.labels is None)
        # Without gradients, or in compiled code, nothing can be observed, and the batch would stay padded in every
        # call. It is packed instead; the card says that padding is zeros.
        observable = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not packs_everything()
        if self.reads_padding is None and unknown and mask is not None and observable:
            ran("waits_for_gradients")
            return CallPlan(observe=partial(self._observe, call, mask))
        return CallPlan(self._layout_of(values, mask, call.labels), call.first_tokens_only)

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

    def _layout_of(self, values: Tensor, mask_BS: Tensor | None, labels: Tensor | None) -> Layout | None:
        """The layout of a call's tokens; None to stay padded."""
        shape = values.shape[:2]
        if mask_BS is not None and mask_BS.shape != shape:
            return None
        if mask_BS is not None and (known := known_batch().of(mask_BS)) is not None:
            if known.layout is not None:
                torch._assert_async((known.layout.mask_BS == mask_BS.bool()).all(), _CHANGED)
                if self.rules.head_has_token_loss and labels is not None and labels.shape == shape:
                    torch._assert_async(((labels == IGNORED) | known.layout.mask_BS).all(), _LABELLED)
            return known.layout
        return self._count_and_lay_out(values, mask_BS, labels)

    @run_eagerly(COUNTED_ON_HOST_MESSAGE)
    def _count_and_lay_out(self, values: Tensor, mask_BS: Tensor | None, labels: Tensor | None) -> Layout | None:
        if mask_BS is None:
            mask_BS = values.new_ones(values.shape[:2], dtype=torch.bool)
            counts = [mask_BS.shape[1]] * len(mask_BS)
        else:
            ran("counted_in_the_call")
            counts = self.rules.lengths(mask_BS, labels).tolist()
        return None if STAYS_PADDED in counts or not counts else lay_out(mask_BS, sum(counts), self.pad_to_multiple_of)

    def _observe(self, call: Call, mask_BS: Tensor, output: Any) -> None:
        """Look at the gradient of the encoder's padded result when it arrives."""
        last = output[0]
        if not last.requires_grad:  # the encoder is frozen
            if not any(p.requires_grad for p in call.outermost.parameters()):
                return  # the caller may use the output as a tensor without a gradient
            last.requires_grad_()
        last.register_hook(partial(self._conclude, ~mask_BS.bool()))

    def _conclude(self, padding: Tensor, grad_BSH: Tensor) -> None:
        """Note that padding is not read, or raise ValueError. Synchronizes."""
        gradient = grad_BSH.detach()[padding]
        if not gradient.numel() or not bool(gradient.isfinite().all()):
            return  # nothing to see: infinity times a zero mask is NaN, as when fp16 overflows
        if bool(gradient.any()):
            raise ValueError(READS_PADDING)
        # Only after the backward pass: gradient checkpointing may still recompute this forward pass, which needs the
        # layout that it had.
        torch.autograd.Variable._execution_engine.queue_callback(partial(setattr, self, "reads_padding", False))
