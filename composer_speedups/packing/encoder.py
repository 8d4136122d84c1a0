"""transformers encoders that compute only the real tokens of a padded batch.

The class of an encoder is derived from its original class (see :func:`~.derived_classes.derived_class`). It packs the
tokens, calls the original forward on one long row with variable-length attention, and scatters the result to the padded
slots. The models around it (:class:`~.call.ModelAroundEncoder`) describe each call, and :class:`~.planning.Packing`
plans it before the tokens are embedded.

Shapes: B rows, S slots per row, T packed tokens, H hidden units.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from composer_speedups.packing.call import Call, CallPlan, ModelAroundEncoder, call_of
from composer_speedups.packing.planning import Packing
from composer_speedups.packing.tokens import TokenLayout, gather_tokens, mark_dynamic, scatter_tokens

__all__ = ["UnpaddedEncoder", "UnpaddedModel", "unpadded_encoders"]

_PADDED = CallPlan()


class UnpaddedEncoder(nn.Module):
    """The methods of an encoder that runs on packed tokens, mixed into the encoder's own class.

    Attributes:
        packing: How its batches are packed.
        ran: How the last forward pass ran: ``"unpadded"``, ``"padded"``, or None before the first one.
    """

    prefix = "Unpadded"
    packing: Packing
    ran: str | None = None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Hidden states (B, S, H) → transformers' output with the last hidden state (B, S, H), zeros at padding.

        Without packed tokens in the call's plan, it computes what the untouched encoder computes.
        """
        plan = self._call_plan()
        if plan.layout is None:
            return self._padded(plan, super().forward(hidden_states, attention_mask=attention_mask, **kwargs))
        packed = gather_tokens(hidden_states.flatten(0, 1), plan.layout.indices_T).unsqueeze(0)
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
        self.ran = "padded"
        if plan.observe is not None:
            plan.observe(output)
        return output

    def _packed(self, packed: Tensor, layout: TokenLayout, **kwargs: Any) -> Any:
        """Run the layers on packed tokens, (1, T, H) → transformers' output."""
        return super().forward(packed, attention_mask=None, layout=layout, **kwargs)

    def _scattered(self, packed: Tensor, plan: CallPlan) -> Tensor:
        """The packed last hidden state, (1, T, H) → (B, S, H), zeros at padding."""
        assert plan.layout is not None
        self.ran = "unpadded"
        rows, width = plan.layout.mask_BS.shape
        slots = scatter_tokens(packed.squeeze(0), plan.layout.indices_T, rows * width, guarded=plan.guarded)
        return slots.view(rows, width, -1)

    def _inputs_of_packed(self, inputs: dict[str, Any], layout: TokenLayout) -> dict[str, Any]:
        """The arguments of a model whose encoder packs the batch.

        transformers would expand a mask (B, S) to pairs of slots; it passes a mask in four dimensions on as it is.
        """
        return {**inputs, "attention_mask": layout.mask_BS[:, None, None, :]}


class UnpaddedModel(UnpaddedEncoder, ModelAroundEncoder):
    """An unpadded encoder that is itself a model and also embeds the tokens."""

    def _inputs_of_packed(self, inputs: dict[str, Any], layout: TokenLayout) -> dict[str, Any]:
        return inputs  # its own forward packs the batch, before embedding it

    def _output(self, last: Tensor, plan: CallPlan) -> Any:
        """The packed last hidden state, (1, T, H) → transformers' output, (B, S, H) with zeros at padding."""
        return BaseModelOutput(last_hidden_state=self._scattered(last, plan))  # type: ignore[arg-type]


def unpadded_encoders(model: nn.Module) -> list[UnpaddedEncoder]:
    """The unpadded encoders in a model."""
    return [module for module in model.modules() if isinstance(module, UnpaddedEncoder)]
