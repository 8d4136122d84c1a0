"""Evidence from the first training batch's forward pass: layers that ran on packed tokens, and attention operators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from composer.core import State, get_precision_context

from composer_speedups.core.operator_recorder import OperatorRecorder
from composer_speedups.core.trainer_state import compute_dtype, device_of, is_compiled
from composer_speedups.families.blocks import blocks_of
from composer_speedups.families.family import family_of
from composer_speedups.packing.attention import PositionBias, unpadded_attention
from composer_speedups.packing.disentangled_attention import Relative, disentangled_attention
from composer_speedups.packing.encoder import UnpaddedEncoder
from composer_speedups.packing.tokens import TokenLayout, lay_out_tokens

FLASH = "_flash_attention_forward"
DISENTANGLED = "disentangled_attention"
BIASED = "biased_attention"


class FirstForward:
    """Observes the first forward pass.

    In eager code, hooks count the layers that run on packed tokens, and their operators are recorded. A layer with its
    own kernel names it in ``own_attention``. Compiled code cannot be observed in this way: there, the encoder reports
    whether it ran unpadded, and a probe shows the attention operator.
    """

    def __init__(self) -> None:
        self._encoders: Sequence[UnpaddedEncoder] = ()
        self._recorder: OperatorRecorder | None = None
        self._layout: TokenLayout | None = None  # of the first mask
        self._stayed_padded = False
        self._layers = 0  # number of layers that ran on as many tokens as their layout has
        self._ran: set[str | None] = set()  # ``ran`` of each encoder
        self._operators: list[str] = []
        self._compiled = self._done = False

    def watch(self, state: State, encoders: Sequence[UnpaddedEncoder], watching: ExitStack) -> None:
        """Observe the next forward pass, unless one was already observed, until ``watching`` is closed."""
        if self._done:
            return
        self._encoders, self._layers = encoders, 0
        layouts = [planned.layout for encoder in encoders for planned in encoder.packing.planned]
        if layouts:
            self._layout, self._stayed_padded = layouts[0], layouts[0] is None
        for encoder in encoders:
            encoder.ran = None
        self._compiled = is_compiled(state.model)
        if self._compiled:
            self._operators = _probe_attention(state, encoders[0])
            return
        layers = [layer for encoder in encoders for layer in blocks_of(encoder)]
        for layer in layers:
            watching.callback(layer.register_forward_pre_hook(self._see, with_kwargs=True).remove)
        self._recorder = watching.enter_context(OperatorRecorder())

    def _see(self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        relative = kwargs.get("relative_pos")
        layout = relative.layout if isinstance(relative, Relative) else kwargs.get("layout")
        if isinstance(layout, TokenLayout) and args[0].shape[:2] == (1, len(layout.indices_T)):
            self._layout = layout
            self._layers += 1

    def stop(self) -> None:
        """Read what was observed, after the forward pass."""
        if self._done:
            return
        self._done, self._ran = True, {encoder.ran for encoder in self._encoders}
        if self._recorder is not None:
            layers = [layer for encoder in self._encoders for layer in blocks_of(encoder)]
            own = {str(layer.own_attention) for layer in layers if getattr(layer, "own_attention", None)}
            self._operators = [*sorted(own), *operators_among(self._recorder.counts)]

    def failure(self) -> tuple[str, str] | None:
        """Return the reason and the fix if the encoder did not run on packed tokens, else None."""
        if self._stayed_padded:
            return self._encoders[0].packing.padded_because
        if self._ran != {"unpadded"}:
            how = "padded" if "padded" in self._ran else "without its encoder"
            return f"the first forward pass ran {how}", "do not change attention and output settings"
        layers = sum(len(blocks_of(encoder)) for encoder in self._encoders)
        if not self._compiled and self._layers < layers:
            return f"{self._layers} of {layers} layers ran on packed tokens", "do not change the encoder's layers"
        if not self._operators:
            return "no variable-length attention ran", "do not change the model's attention"
        return None

    def evidence(self) -> dict[str, Any]:
        """Return the evidence for report.json."""
        evidence: dict[str, Any] = {
            "layers": sum(len(blocks_of(encoder)) for encoder in self._encoders),
            "attention": ", ".join(self._operators),
            "attention_seen_in": "probe" if self._compiled else "forward pass",
        }
        if self._layout is not None:
            slots, packed = self._layout.mask_BS.numel(), len(self._layout.indices_T)
            tokens = int(self._layout.mask_BS.sum())
            evidence |= {"first_batch_slots": slots, "first_batch_tokens": tokens, "first_batch_packed": packed}
            if tokens == slots:
                evidence["note"] = "the first batch has no padding to remove"
            elif packed >= slots:
                evidence["note"] = "the first batch is no smaller packed than padded; lower pad_to_multiple_of"
        return evidence


def operators_among(counts: dict[str, int]) -> list[str]:
    """The attention operators in a count of aten operators."""
    known = [name for name in counts if name.startswith(("_scaled_dot_product", FLASH, DISENTANGLED, BIASED))]
    # SDPA's math kernel is decomposed before dispatch; no other attention uses this softmax operator.
    return sorted(name.strip("_") for name in known) or ["scaled_dot_product_math"] * ("_safe_softmax" in counts)


def _probe_attention(state: State, encoder: UnpaddedEncoder) -> list[str]:
    """Return the operators of attention over a few tokens, in the run's precision and with the model's head size."""
    config, device = encoder.packing.config, device_of(state)
    heads = config.num_attention_heads
    layout = lay_out_tokens(torch.ones(2, 4, dtype=torch.bool, device=device), 8)
    recorder = OperatorRecorder()
    with torch.no_grad(), get_precision_context(state.precision, state.precision_config):
        shape = (1, heads, len(layout.indices_T), config.hidden_size // heads)
        query = torch.ones(shape, device=device, dtype=compute_dtype(state))
        family = family_of(type(encoder))
        if family is not None and family.position_table is not None:
            entries = torch.zeros(2 * layout.longest + 1, dtype=torch.int32, device=device)
            packed = query.squeeze(0).transpose(0, 1).flatten(1)
            with recorder:
                disentangled_attention(
                    packed, packed, packed, packed[:2].repeat(1, 2), Relative(layout, entries), heads, 0.0
                )
            return operators_among(recorder.counts)
        bias = None
        if family is not None and family.position_bias:
            bias = PositionBias(layout, torch.zeros(heads, 2 * layout.longest + 1, device=device))
        with recorder:
            unpadded_attention(encoder, query, query, query, None, layout=layout, position_bias=bias)
    return operators_among(recorder.counts)
