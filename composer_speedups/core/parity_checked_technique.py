"""Techniques that change how a model computes its result, and the comparison with the untouched model.

A model whose modules are all exactly transformers' own is not compared at run time: the parity tests cover it. For any
other model, the first micro-batch runs through the untouched and the changed model before anything is trained.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

import torch
from composer.core import Event, State, get_precision_context
from pydantic import Field
from torch import Tensor

from composer_speedups.core.errors import CannotRunError, first_line
from composer_speedups.core.stock import changes_to
from composer_speedups.core.technique import Technique, techniques_of
from composer_speedups.core.trainer_state import any_rank, loss_of_this_rank, model_of, world_size
from composer_speedups.packing.comparison import (
    SIXTEEN_BITS,
    Check,
    Difference,
    Outcome,
    compare,
    measure,
    tolerance_of,
    with_padding,
)
from composer_speedups.packing.rows import token_masks
from composer_speedups.packing.untouched import untouched

__all__ = ["ParityCheckedTechnique"]

_FIX = "remove it for this model; or, if the difference is intended, set check: never"


class ParityCheckedTechnique(Technique):
    """A technique whose model is compared with the untouched one.

    Raises:
        CannotRunError: In the first micro-batch, if the changed model's result differs.
    """

    not_recorded = (*Technique.not_recorded, "check")

    _: KW_ONLY
    check: Check = Field("auto")
    """Compare loss, outputs and gradients of the first micro-batch with the untouched model's. auto: only if the model
    is not exactly transformers' own."""

    def reset(self) -> None:
        super().reset()
        self._because: str | None = None  # why a comparison is due; None if none is due
        self._evaluated = False  # compared at least once; an evaluation does not compare again

    @abstractmethod
    def withdraw(self, state: State) -> None:
        """Restore the model; also called when the Trainer closes."""

    def close(self) -> None:
        super().close()
        state = self._state() if self._state is not None else None
        if state is not None and self.applied:
            self.withdraw(state)

    @property
    def compare_in_training_precision(self) -> bool:
        """Whether to compare in the precision of training instead of float32."""
        return False

    def before_engaging(self, state: State) -> None:
        if self.check == "always":
            self._because = "check: always"
        elif self.check == "auto":
            self._because = next(iter(changes_to(state.model)), None)

    def before_first_forward(self, event: Event, state: State) -> None:
        compare_with_untouched(event, state)


def compare_with_untouched(event: Event, state: State) -> None:
    """Compare the first micro-batch with the untouched model's, if that is due.

    Raises:
        CannotRunError: Names the techniques, the difference, and how the model deviates from transformers' own.
    """
    training = event == Event.BEFORE_FORWARD
    engaged = [t for t in techniques_of(state.algorithms) if isinstance(t, ParityCheckedTechnique) and t.engaged]
    due = [t for t in engaged if t._because is not None and (training or not t._evaluated)]
    if not due:
        return
    for technique in due:
        technique._evaluated = True
    trial, names = _Comparison(state, engaged, gradients=training), " and ".join(technique.name for technique in due)
    failure, difference = "", Difference(None, None, None)
    try:
        difference = compare(*trial.untouched_and_changed(), trial.tolerance)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        failure = first_line(error)
    if any_rank(trial.state.device, bool(failure)):
        reason = f"the comparison with the untouched model failed ({failure or 'on another rank'})"
        raise CannotRunError(names, reason, _FIX)
    if any_rank(trial.state.device, difference.beyond is not None):
        reason = f"{difference.beyond or 'another rank found a difference'} on the first batch"
        raise CannotRunError(
            names, f"its result differs from the untouched model's: {reason} ({due[0]._because})", _FIX
        )
    for technique in due:
        technique.evidence["compared_with_untouched"] = difference.evidence() | {"because": technique._because}
        if training:
            technique._because = None


class _Comparison:
    """One micro-batch that runs several times, with half of its rows if a run does not fit into memory, and so on."""

    def __init__(self, state: State, techniques: Sequence[ParityCheckedTechnique], *, gradients: bool) -> None:
        self.state = state
        self._batch = with_padding(state.batch)
        self._sharded = state.fsdp_config is not None or state.tp_config is not None
        # torch.autograd.grad does not return gradients of FSDP shards
        self._gradients = gradients and not self._sharded
        self._with_loss = gradients
        self._model: Any = state.model if self._sharded else model_of(state)
        coarse = any(technique.compare_in_training_precision for technique in techniques)
        self.tolerance = SIXTEEN_BITS if coarse else tolerance_of(self._model)

    @property
    def _mask(self) -> Tensor | None:
        """The batch's attention mask (B, S); with several texts per sample, their masks are concatenated along S."""
        mask = token_masks(self._batch).get("attention_mask")
        return None if mask is None else mask.flatten(1)

    def untouched_and_changed(self) -> tuple[Outcome, Outcome]:
        """Run the untouched and the changed model."""
        while True:
            try:
                changed = self.outcome()
                with untouched(self._model):
                    return self.outcome(), changed
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError) or self._sharded:
                    raise
                if world_size() > 1 and not _loss_respects_loss_ranks(self._model):
                    raise torch.OutOfMemoryError(
                        f"the comparison with the untouched model ran out of memory ({first_line(error)}), and one of "
                        f"{world_size()} ranks cannot repeat it with fewer samples, since its loss may gather samples "
                        "from the others; lower the micro-batch, or set check: never"
                    ) from error
                if not self._halve():
                    raise

    def _halve(self) -> bool:
        """Keep the first half of the rows, and return whether that was possible."""
        rows = 0 if self._mask is None else len(self._mask)
        if rows < 2 or any(not isinstance(v, Sequence | Tensor) or len(v) != rows for v in self._batch.values()):
            return False
        self._batch = {name: value[: rows // 2] for name, value in self._batch.items()}
        torch.cuda.empty_cache()
        return True

    def outcome(self) -> Outcome:
        return measure(self._model, self._call, self._mask, gradients=self._gradients)

    def _call(self) -> tuple[Any, Tensor | None]:
        if self.tolerance is SIXTEEN_BITS:  # compared in the precision of training
            with get_precision_context(self.state.precision, self.state.precision_config):
                return self._forward()
        return self._forward()

    def _forward(self) -> tuple[Any, Tensor | None]:
        outputs = self._model(self._batch)
        if not self._with_loss:
            return outputs, None
        with loss_of_this_rank():  # other ranks may have halved their batch
            loss = model_of(self.state).loss(outputs, self._batch)
        if isinstance(loss, Tensor):
            return outputs, loss
        losses = list(loss.values()) if isinstance(loss, dict) else list(loss)
        return outputs, torch.stack(losses).sum()


def _loss_respects_loss_ranks(model: Any) -> bool:
    """Whether the loss is defined by this package or by Composer, which call :func:`.loss_ranks` before they gather."""
    methods = [type(owner).loss for owner in (model, getattr(model, "task", model))]
    return all(method.__module__.partition(".")[0] in ("composer", "composer_speedups") for method in methods)
