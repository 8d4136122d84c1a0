"""transformers encoders that compute only the real tokens of a padded batch.

The class of an encoder is derived from its original class (see :func:`~.derived_classes.derived_class`). It packs the
tokens, calls the original forward on one long row with variable-length attention, and scatters the result to the padded
slots. The models around it (:class:`~.call.ModelAroundEncoder`) describe each call, and :class:`~.planning.Packing`
plans it before the tokens are embedded.

Shapes: B rows, S slots per row, T packed tokens, H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.kernels.host import ran
from composer_speedups.packing.call import (
    Call,
    CallPlan,
    ModelAroundEncoder,
    call_of,
    take_row_lengths,
    with_known_batch,
)
from composer_speedups.packing.labelled_head import labelled_heads
from composer_speedups.packing.layout import Layout, mark_dynamic
from composer_speedups.packing.planning import Packing
from composer_speedups.packing.rows import CountedRows, count_rows

_PADDED = CallPlan()


class UnpaddedEncoder(nn.Module):
    """The methods of an encoder that runs on packed tokens, mixed into the encoder's own class.

    Attributes:
        packing: How its batches are packed.
    """

    prefix = "Unpadded"
    packing: Packing

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Hidden states (B, S, H) → transformers' output with the last hidden state (B, S, H), zeros at padding.

        Without packed tokens in the call's plan, it computes what the untouched encoder computes.
        """
        plan = self._call_plan()
        if plan.layout is None:
            return self._padded(plan, super().forward(hidden_states, attention_mask=attention_mask, **kwargs))
        packed = plan.layout.gather(hidden_states).unsqueeze(0)
        mark_dynamic(packed)
        if plan.first_tokens_only:
            # a keyword argument, so that it is also passed when a layer is recomputed
            kwargs["first_tokens_only"] = True
        output = self._packed(packed, plan.layout, **kwargs)
        output.last_hidden_state = self._scattered(output.last_hidden_state, plan)
        return output

    def prepare_call(self, call: Call, inputs: dict[str, Any]) -> dict[str, Any]:
        """Plan a call of the model directly around the encoder, from its arguments by name.

        Returns:
            The arguments to call the model's own forward with.
        """
        call.plan = self.packing.plan_call(call, inputs)
        return inputs if call.plan.layout is None else self._inputs_of_packed(inputs, call.plan.layout)

    def _call_plan(self) -> CallPlan:
        """The plan of this thread's call. A direct call of the encoder has none, and stays padded."""
        call = call_of(self)
        return _PADDED if call is None or call.plan is None else call.plan

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
        """The arguments of a model whose encoder packs the batch.

        transformers would expand a mask (B, S) to pairs of slots; it passes a mask in four dimensions on as it is.
        """
        return {**inputs, "attention_mask": layout.mask_BS[:, None, None, :]}


class UnpaddedModel(UnpaddedEncoder, ModelAroundEncoder):
    """An unpadded encoder that is itself a model and also embeds the tokens."""

    def _inputs_of_packed(self, inputs: dict[str, Any], layout: Layout) -> dict[str, Any]:
        return inputs  # its own forward packs the batch, before embedding it

    def _output(self, last: Tensor, plan: CallPlan) -> Any:
        """The packed last hidden state, (1, T, H) → transformers' output, (B, S, H) with zeros at padding."""
        return BaseModelOutput(last_hidden_state=self._scattered(last, plan))  # type: ignore[arg-type]


def unpadded_encoders(model: nn.Module) -> list[UnpaddedEncoder]:
    """The unpadded encoders in a model."""
    return [module for module in model.modules() if isinstance(module, UnpaddedEncoder)]


def with_counted_rows(model: nn.Module, batch: Any, moved: Any) -> AbstractContextManager[None]:
    """Let this thread's forward passes use the row lengths of a batch.

    ``batch`` is on the CPU, and ``moved`` has its tensors on the device.

    For loops whose model does not pass its arguments on as they are; see :func:`with_row_lengths`.
    """
    packings = [encoder.packing for encoder in unpadded_encoders(model)]
    if not packings:
        return nullcontext()
    rules = [packing.rules for packing in packings]
    counted = {**moved, **count_rows(batch, rules, labels=bool(labelled_heads(model)))}
    return with_known_batch(take_row_lengths(counted, rules, packings[0].pad_to_multiple_of))


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
