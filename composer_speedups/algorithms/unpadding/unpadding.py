"""The encoder runs on real tokens only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from composer.core import Event, State
from composer.loggers import Logger

from composer_speedups.algorithms.unpadding.evidence import FirstForward
from composer_speedups.algorithms.unpadding.functional import check_settings
from composer_speedups.algorithms.unpadding.heads import restore_encoders, swap_encoders
from composer_speedups.core.compared_technique import Check, ComparedTechnique
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.technique import OnUnavailable, Stage, Technique
from composer_speedups.families.packed_encoder import Layout, UnpaddedEncoder, unpadded_encoders
from composer_speedups.families.packed_tokens import row_counts

__all__ = ["Unpadding"]

# Composer cuts lists in a batch into micro-batches along with its tensors, and leaves them on the host.
_COUNTS = "unpadding_row_counts_of_"
_KEPT = f"{_COUNTS}rows_kept_padded"
_COUNT_AT = (Event.BATCH_START, Event.EVAL_BATCH_START)
_PLAN_AT = (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD)
_FORGET_AT = (Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD, Event.FIT_END)


class Unpadding(ComparedTechnique):
    """The encoder runs on real tokens only, with variable-length attention.

    Args:
        pad_to_multiple_of: The number of packed tokens is a multiple of it. Default 64.
        check: See :class:`ComparedTechnique`.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: A multiple below 1 or above 65536.
        TechniqueError: At INIT, for a model or head that it cannot serve; in the first batch, for a model of one's own
            that reads what is computed for padding.
    """

    name = "unpadding"
    stage = Stage.SURGERY
    clashes: ClassVar[dict[str, str]] = {
        "sdpa_attention": "both set the model's attention; unpadding brings its own",
    }

    clashes_with_settings: ClassVar[dict[str, str]] = {
        "torch_compile": "dynamic: false and modes that capture graphs begin anew with every number of tokens"
    }

    def __init__(
        self, pad_to_multiple_of: int = 64, check: Check = "auto", *, on_unavailable: OnUnavailable = "stop"
    ) -> None:
        super().__init__(check=check, on_unavailable=on_unavailable)
        check_settings(pad_to_multiple_of)
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
            self.reapply(state)
        except ValueError as error:
            reason = str(error).removeprefix("unpadding ")  # the error says the name itself
            raise TechniqueError(self.name, reason, "take it out for this model") from error
        return {"encoders": len(self._encoders)}

    def reapply(self, state: State) -> None:
        swap_encoders(state.model, self.pad_to_multiple_of, self.owner)
        self._encoders = unpadded_encoders(state.model)

    def withdraw(self, state: State) -> None:
        restore_encoders(state.model, self.owner)

    def own_batch(self, batch: Any) -> Any:
        if not isinstance(batch, dict):
            return batch
        return {name: value for name, value in batch.items() if not str(name).startswith(_COUNTS)}

    def match(self, event: Event, state: State) -> bool:
        return super().match(event, state) or (bool(self.engaged) and event in _COUNT_AT + _PLAN_AT + _FORGET_AT)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event in _COUNT_AT:
            self._count(event, state)
        elif event in _PLAN_AT:
            self.prepare_first_forward(event, state)
            self._plan(event, state)
        elif event in _FORGET_AT:
            self._forget()
        super().apply(event, state, logger)

    def _count(self, event: Event, state: State) -> None:
        """Count while the batch is on the host; the last change to it is behind us."""
        known = [encoder for encoder in self._encoders if isinstance(encoder, UnpaddedEncoder)]
        for name, mask in _masks_of(state.batch).items():
            if mask.device.type != "cpu":
                continue
            counts = known[0].count(mask) if known else row_counts(mask)
            state.batch = {**state.batch, f"{_COUNTS}{name}": counts}
            labels = state.batch.get("labels")
            if name == "attention_mask" and known and not (isinstance(labels, torch.Tensor) and labels.is_cuda):
                kept = known[0].reads_padding(mask, labels if isinstance(labels, torch.Tensor) else None)
                if any(kept):
                    state.batch[_KEPT] = kept
            if event == Event.BATCH_START:
                self._tokens += sum(map(abs, counts))
                self._slots += mask.numel()

    def _plan(self, event: Event, state: State) -> None:
        """Lay out the micro-batch on its device, from the counts that came with it.

        A mask that is not among the batch's own is counted by the encoder that meets it.
        """
        if not isinstance(state.batch, dict):
            return
        plans: dict[UnpaddedEncoder, list[tuple[torch.Tensor, Layout]]] = {}
        keep_padded = any(state.batch.pop(_KEPT, ()))
        for name, mask in _masks_of(state.batch).items():
            counts = state.batch.pop(f"{_COUNTS}{name}", None)
            if counts is None or len(counts) != len(mask):
                continue
            for encoder in self._encoders:
                if isinstance(encoder, UnpaddedEncoder):  # and nobody turned it back
                    kept = keep_padded and name == "attention_mask"
                    layout: Layout = "padded" if kept else encoder.layout(mask, counts)
                    plans.setdefault(encoder, []).append((mask, layout))
                    self._padded += layout == "padded" and event == Event.BEFORE_FORWARD
        for encoder, found in plans.items():
            encoder.plans = tuple(found)

    def _forget(self) -> None:
        for encoder in self._encoders:
            encoder.plans = ()

    def observe(self, event: Event, state: State) -> None:
        if event == Event.BEFORE_FORWARD and not self._verified:
            self._first.watch(state, self._encoders)
        elif event == Event.AFTER_FORWARD:
            self._first.stop()

    def close(self) -> None:
        self._first.stop()
        self._forget()
        super().close()

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


def _masks_of(batch: Any) -> dict[str, torch.Tensor]:
    """The attention masks (B, S) of a batch by their names: ``attention_mask``, and a bi-encoder's further ones."""
    if not isinstance(batch, Mapping):
        return {}
    return {
        name: value
        for name, value in batch.items()
        if isinstance(name, str) and "attention_mask" in name and isinstance(value, torch.Tensor)
        if value.ndim == 2 and value.numel()
    }
