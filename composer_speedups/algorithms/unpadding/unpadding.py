"""The encoder runs on real tokens only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from composer.core import Event, State
from composer.loggers import Logger
from torch import nn

from composer_speedups.algorithms.technique import OnUnavailable, Stage, Technique
from composer_speedups.algorithms.unpadding.encoders import UnpaddedEncoder, unpadded_encoders
from composer_speedups.algorithms.unpadding.evidence import FirstForward
from composer_speedups.algorithms.unpadding.heads import swap_encoders
from composer_speedups.algorithms.unpadding.plan import row_counts
from composer_speedups.errors import TechniqueError

__all__ = ["Unpadding", "apply_unpadding"]

# Composer cuts lists in a batch into micro-batches along with its tensors, and leaves them on the host.
_COUNTS = "unpadding_row_counts"
_COUNT_AT = (Event.BATCH_START, Event.EVAL_BATCH_START)
_PLAN_AT = (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD)
_FORGET_AT = (Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD, Event.FIT_END)


def apply_unpadding(model: nn.Module, pad_to_multiple_of: int = 64) -> list[str]:
    """Make the encoder of a Hugging Face model run on real tokens only.

    Args:
        model: A BERT, RoBERTa, ELECTRA, DistilBERT or ModernBERT of transformers, or a module that holds some;
            changed in place. Its parameters, their names and its ``state_dict`` stay.
        pad_to_multiple_of: The number of packed tokens is rounded up to a multiple of it. Default 64:
            matrix products over a number that is no multiple of 8 are slow.

    Returns:
        Names of the encoders changed; those that already were are left out.

    Raises:
        ValueError: A model, head or number that it cannot serve.

    Each forward pass then counts its tokens, and waits for the GPU to do so; :func:`plan_unpadding` takes the
    count from a mask that is still on the CPU. Source: padding-free batches of Zeng et al., arXiv 2208.08124.
    """
    _check(pad_to_multiple_of)
    return swap_encoders(model, pad_to_multiple_of)


def _check(pad_to_multiple_of: int) -> None:
    if not 1 <= pad_to_multiple_of <= 65_536:
        raise ValueError(f"pad_to_multiple_of must be 1 to 65536, not {pad_to_multiple_of}")


class Unpadding(Technique):
    """The encoder runs on real tokens only, with variable-length attention.

    Args:
        pad_to_multiple_of: The number of packed tokens is a multiple of it. Default 64.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: A multiple below 1 or above 65536.
        TechniqueError: At INIT, for a model or head that it cannot serve.
    """

    name = "unpadding"
    stage = Stage.SURGERY
    clashes: ClassVar[dict[str, str]] = {
        "sdpa_attention": "both set the model's attention; unpadding brings its own",
    }

    clashes_with_settings: ClassVar[dict[str, str]] = {
        "torch_compile": "dynamic: false and modes that capture graphs begin anew with every number of tokens"
    }

    def __init__(self, pad_to_multiple_of: int = 64, *, on_unavailable: OnUnavailable = "stop") -> None:
        super().__init__(on_unavailable=on_unavailable)
        _check(pad_to_multiple_of)
        self.pad_to_multiple_of = pad_to_multiple_of
        self._encoders: list[UnpaddedEncoder] = []
        self._first = FirstForward()
        self._tokens = self._slots = self._padded = 0  # of all training batches

    def clash(self, other: Technique) -> str | None:
        if getattr(other, "makes_graphs", False) or getattr(other, "dynamic", None) is False:
            return self.clashes_with_settings[other.name]
        return super().clash(other)

    def engage(self, state: State) -> dict[str, Any]:
        try:
            apply_unpadding(state.model, self.pad_to_multiple_of)
        except ValueError as error:
            reason = str(error).removeprefix("unpadding ")  # the error says the name itself
            raise TechniqueError(self.name, reason, "take it out for this model") from error
        self._encoders = unpadded_encoders(state.model)
        return {"encoders": len(self._encoders)}

    def match(self, event: Event, state: State) -> bool:
        return super().match(event, state) or (bool(self.engaged) and event in _COUNT_AT + _PLAN_AT + _FORGET_AT)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event in _COUNT_AT:
            self._count(event, state)
        elif event in _PLAN_AT:
            self._plan(event, state)
        elif event in _FORGET_AT:
            self._forget()
        super().apply(event, state, logger)

    def _count(self, event: Event, state: State) -> None:
        """Count while the batch is on the host; the last change to it is behind us."""
        mask = _mask_of(state.batch)
        if mask is None or mask.device.type != "cpu":
            return
        known = [encoder for encoder in self._encoders if isinstance(encoder, UnpaddedEncoder)]
        counts = known[0].count(mask) if known else row_counts(mask)
        state.batch = {**state.batch, _COUNTS: counts}
        if event == Event.BATCH_START:
            self._tokens += sum(map(abs, counts))
            self._slots += mask.numel()

    def _plan(self, event: Event, state: State) -> None:
        """Lay out the micro-batch on its device, from the counts that came with it."""
        counts = state.batch.pop(_COUNTS, None) if isinstance(state.batch, dict) else None
        mask = _mask_of(state.batch)
        if mask is None or counts is None or len(counts) != len(mask) or len(self._encoders) != 1:
            return  # the encoders count for themselves
        encoder = self._encoders[0]
        if isinstance(encoder, UnpaddedEncoder):  # and nobody turned it back
            encoder.plan = encoder.layout(mask, counts)
            self._padded += encoder.plan == "padded" and event == Event.BEFORE_FORWARD

    def _forget(self) -> None:
        for encoder in self._encoders:
            encoder.plan = None

    def observe(self, event: Event, state: State) -> None:
        if event == Event.BEFORE_FORWARD and not self._verified:
            self._first.watch(state, self._encoders)
        elif event == Event.AFTER_FORWARD:
            self._first.stop()

    def close(self) -> None:
        self._first.stop()
        self._forget()

    def verify(self, state: State) -> dict[str, Any]:
        failure = self._first.failure()
        if failure is not None:
            raise self.not_engaged(*failure)
        evidence = self._first.evidence()
        if self._slots:
            evidence["padding_of_the_run"] = round(1 - self._tokens / self._slots, 4)
        if self._padded:
            evidence["micro_batches_left_padded"] = self._padded
        return evidence


def _mask_of(batch: Any) -> torch.Tensor | None:
    """The attention mask (B, S) of a batch, where it has one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.numel() else None
