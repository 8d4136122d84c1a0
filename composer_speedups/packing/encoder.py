"""transformers encoders that compute only the real tokens of a padded batch.

The class of an encoder is derived from its original class (see :func:`~.derived_classes.derived_class`). It packs the
tokens, calls the original forward on one long row with variable-length attention, and scatters the result to the padded
slots. The models around it (:class:`~.call.ModelAroundEncoder`) describe each call, and :class:`Packing` plans it
before the tokens are embedded.

A masked-LM head may compute labelled tokens only, since the loss reads no other logits. ModernBERT's config has this as
``sparse_prediction``; here it is for every family, without a synchronization if the labels were counted on the host.

Shapes: B rows, S slots per row, T packed tokens, M labelled tokens, H hidden units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.kernels.common import ran
from composer_speedups.packing.call import (
    Call,
    CallPlan,
    ModelAroundEncoder,
    call_of,
    changed_modules,
    know_batch,
    known_batch,
    models_around_encoders,
    take_row_lengths,
    unwrapped,
    with_known_batch,
)
from composer_speedups.packing.derived_classes import stock_class
from composer_speedups.packing.layout import MULTIPLE, Layout, counts_on_host, lay_out, mark_dynamic, packed_tokens
from composer_speedups.packing.rows import IGNORED, ROW_LABELS, CountedRows, RowRules, as_numpy, count_rows
from composer_speedups.packing.untouched import packs_everything

_PADDED = CallPlan()
MLMHead = Literal["all", "labelled"]
_HEAD = "ForMaskedLM"
READS_PADDING = (
    "unpadding: the loss reads outputs at padding positions, which would be zeros; give padding the label -100, pool "
    "with the attention mask, or, if padding makes no difference, set check='never'"
)


@dataclass
class Packing:
    """Decides for each call of one encoder whether its batch is packed, and lays out the tokens.

    A call whose tokens were not counted on the host counts them itself.
    """

    config: Any  # of the model directly around the encoder
    pad_to_multiple_of: int | None  # see layout.multiple_for
    rules: RowRules  # which rows stay padded, with their batch
    # Whether unknown code reads the result at padding; None until the gradients of a batch show that it does not.
    reads_padding: bool | None = False
    blocks: str = "layer"  # path of the encoder's list of the blocks

    def plan_call(self, call: Call, inputs: dict[str, Any]) -> CallPlan:
        """Plan a call of the model directly around the encoder. A batch stays padded if it cannot be packed, if the
        head reads padding (:class:`.RowRules`), or until it is known whether other code reads it."""
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
        layout = self._layout_of(values, mask, call.labels)
        known = None if layout is None or mask is None else known_batch().of(mask)
        prefix = None if known is None else known.prefix
        if prefix is not None:  # of this call's tokens; another call with the same mask may have others
            know_batch(known_batch().without(prefix))
        return CallPlan(layout, call.first_tokens_only, prefix=prefix)

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
        if not shape.numel() or (mask_BS is not None and mask_BS.shape != shape):
            return None
        if mask_BS is None:
            mask_BS = values.new_ones(shape, dtype=torch.bool)
            packed = packed_tokens(shape.numel(), shape, self.pad_to_multiple_of or MULTIPLE)
        elif (known := known_batch().of(mask_BS)) is None:
            return self._count_and_lay_out(mask_BS, labels)
        elif known.packed is None:
            ran("kept_padded")
            return None
        else:
            mask_BS, packed = mask_BS.bool(), len(known.packed)
            self.rules.assert_packable(mask_BS, labels)
        return lay_out(mask_BS, packed, self.pad_to_multiple_of)

    @counts_on_host
    def _count_and_lay_out(self, mask_BS: Tensor, labels: Tensor | None) -> Layout | None:
        """The layout of a mask; None to stay padded. Synchronizes with a GPU's mask.

        The number of tokens stays in this function: code compiled after this call would treat it as a constant.
        """
        ran("counted_in_the_call")
        counts = self.rules.lengths(mask_BS, labels)
        if counts.min() < 0:
            return None
        packed = packed_tokens(int(counts.sum()), mask_BS.shape, self.pad_to_multiple_of)
        return lay_out(mask_BS, packed, self.pad_to_multiple_of)

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


class UnpaddedEncoder(nn.Module):
    """The methods of an encoder that runs on packed tokens, mixed into the encoder's own class."""

    prefix = "Unpadded"
    packing: Packing

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Hidden states (B, S, H) → transformers' output with the last hidden state (B, S, H), zeros at padding."""
        plan = self._call_plan()
        if plan.layout is None:
            return self._padded(plan, super().forward(hidden_states, attention_mask=attention_mask, **kwargs))
        packed = plan.layout.gather(hidden_states).unsqueeze(0) if plan.prefix is None else plan.prefix.hidden
        mark_dynamic(packed)
        if plan.first_tokens_only:
            # a keyword argument, so that it is also passed when a layer is recomputed
            kwargs["first_tokens_only"] = True
        output = self._behind_prefix(plan)._packed(packed, plan.layout, **kwargs)
        output.last_hidden_state = self._scattered(output.last_hidden_state, plan)
        return output

    def prepare_call(self, call: Call, inputs: dict[str, Any]) -> dict[str, Any]:
        """Plan a call of the model directly around the encoder; return the arguments for the model's own forward."""
        call.plan = self.packing.plan_call(call, inputs)
        return inputs if call.plan.layout is None else self._inputs_of_packed(inputs, call.plan.layout)

    def _call_plan(self) -> CallPlan:
        """The plan of this thread's call. A direct call of the encoder has none, and stays padded."""
        call = call_of(self)
        return _PADDED if call is None or call.plan is None else call.plan

    def _behind_prefix(self, plan: CallPlan) -> Any:
        """The encoder; if the plan has a prefix, a shallow copy without the blocks of the prefix."""
        if plan.prefix is None:
            return self
        for _ in range(plan.prefix.blocks):
            ran("cached_block")
        return _without_first(self, self.packing.blocks, plan.prefix.blocks)

    def _padded(self, plan: CallPlan, output: Any) -> Any:
        """The result of the untouched forward."""
        ran("padded_encoder")
        if plan.observe is not None:
            plan.observe(output)
        return output

    def _packed(self, packed: Tensor, layout: Layout, **kwargs: Any) -> Any:
        """Run the layers on packed tokens, (1, T, H) → transformers' output."""
        return super().forward(packed, attention_mask=None, layout=layout, **kwargs)

    def _scattered(self, packed: Tensor, plan: CallPlan) -> Tensor:
        """The packed last hidden state, (1, T, H) → (B, S, H), zeros at padding."""
        assert plan.layout is not None
        ran("packed_encoder")
        return plan.layout.scatter(packed.squeeze(0))

    def _inputs_of_packed(self, inputs: dict[str, Any], layout: Layout) -> dict[str, Any]:
        """The model's arguments, with a mask that transformers does not expand to pairs of slots."""
        return {**inputs, "attention_mask": layout.mask_BS[:, None, None, :]}


def _without_first(module: nn.Module, path: str, count: int) -> nn.Module:
    """A shallow copy of a module, whose list of blocks, at a path inside it, lacks the first ones."""
    name, _, rest = path.partition(".")
    shorter, inside = copy.copy(module), getattr(module, name)
    inside = _without_first(inside, rest, count) if rest else inside[count:]
    vars(shorter)["_modules"] = {**module._modules, name: inside}
    return shorter


class UnpaddedModel(UnpaddedEncoder, ModelAroundEncoder):
    """An unpadded encoder that is itself a model and also embeds the tokens."""

    def _inputs_of_packed(self, inputs: dict[str, Any], layout: Layout) -> dict[str, Any]:
        return inputs  # its own forward packs the batch, before embedding it

    def _output(self, last: Tensor, plan: CallPlan) -> Any:
        """The packed last hidden state, (1, T, H) → transformers' output, (B, S, H) with zeros at padding."""
        return BaseModelOutput(last_hidden_state=self._scattered(last, plan))  # type: ignore[arg-type]


class LabelledHead:
    """In training calls with labels (B, S), the head gets the hidden states of the labelled tokens, (1, M, H), and the
    loss gets their labels, (1, M), so the logits are (1, M, vocabulary). M is rounded up as T is."""

    def __init__(self, pad_to_multiple_of: int | None) -> None:
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
        if known is None or known.packed is None or known.values.shape != labels_BS.shape:
            return self._count_and_lay_out(labels_BS)
        return lay_out(labels_BS != IGNORED, len(known.packed), self.pad_to_multiple_of)

    @counts_on_host
    def _count_and_lay_out(self, labels_BS: Tensor) -> Layout:
        labelled = int((as_numpy(labels_BS) != IGNORED).sum())
        packed = packed_tokens(labelled, labels_BS.shape, self.pad_to_multiple_of)
        return lay_out(labels_BS != IGNORED, packed, self.pad_to_multiple_of)


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


def unpadded_encoders(model: nn.Module) -> list[UnpaddedEncoder]:
    """The unpadded encoders in a model."""
    return [module for module in changed_modules(model) if isinstance(module, UnpaddedEncoder)]


def with_counted_rows(model: nn.Module, batch: Any, moved: Any) -> AbstractContextManager[None]:
    """Let this thread's forward passes use the row lengths of ``batch`` on the CPU; ``moved`` has it on the device."""
    packings = [encoder.packing for encoder in unpadded_encoders(model)]
    if not packings:
        return nullcontext()
    rules = [packing.rules for packing in packings]
    counted = {**moved, **count_rows(batch, rules, labels=bool(labelled_heads(model)))}
    return with_known_batch(take_row_lengths(counted, packings[0].pad_to_multiple_of))


def with_row_lengths(collate: Callable[[Any], Any], model: nn.Module) -> CountedRows:
    """A collator that counts each row's real tokens on the CPU, so that an unpadded model need not ask the GPU.

    For loops without Composer's Trainer, in which the model is called with the whole batch, ``model(**batch)``.

    Args:
        collate: The collator that makes the batches, as dicts of tensors.
        model: A model that runs unpadded.

    Raises:
        ValueError: It does not.
    """
    encoders = unpadded_encoders(model)
    if not encoders:
        raise ValueError("with_row_lengths: the model does not run unpadded; apply Unpadding first")
    return CountedRows(collate, [encoder.packing.rules for encoder in encoders], labels=bool(labelled_heads(model)))
