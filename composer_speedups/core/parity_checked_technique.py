"""Techniques that change how a model computes its result, and the comparison with the untouched model.

A model whose modules are all exactly transformers' own is not compared at run time: the parity tests cover it. For any
other model, the first micro-batch runs through the untouched and the changed model before anything is trained.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

import torch
from composer.core import Event, State, get_precision_context
from pydantic import Field
from torch import Tensor

from composer_speedups.core.comparison import (
    SIXTEEN_BITS,
    Check,
    Outcome,
    compare,
    measure,
    tolerance_of,
    with_padding,
)
from composer_speedups.core.errors import CannotRunError, first_line
from composer_speedups.core.stock import changes_to
from composer_speedups.core.technique import Technique, techniques_of
from composer_speedups.core.trainer_state import any_rank, loss_of_this_rank, model_of, world_size
from composer_speedups.packing.call import forced
from composer_speedups.packing.tokens import token_masks

__all__ = ["ParityCheckedTechnique"]

_FIX = "remove it for this model; or, if the difference is intended, set check: never"
_owners = itertools.count(1)


class ParityCheckedTechnique(Technique):
    """A technique that can be undone and reapplied, so that the changed model can be compared with the untouched one.

    Raises:
        CannotRunError: In the first micro-batch, if the changed model's result differs. With ``on_unavailable: warn``,
            a warning instead, and the technique is withdrawn.
    """

    not_recorded = (*Technique.not_recorded, "check")

    _: KW_ONLY
    check: Check = Field("auto")
    """Compare loss, outputs and gradients of the first micro-batch with the untouched model's. auto: only if the model
    is not exactly transformers' own."""

    def reset(self) -> None:
        super().reset()
        # marks its changes to the model, so that an earlier Trainer does not undo them when it closes
        self.owner = next(_owners)
        self._because: str | None = None  # why a comparison is due; None if none is due
        self._evaluated = False  # compared at least once; an evaluation does not compare again

    @abstractmethod
    def withdraw(self, state: State) -> None:
        """Restore the model; also called when the Trainer closes."""

    @abstractmethod
    def reapply(self, state: State) -> None:
        """Change the model as :meth:`engage` did. Raises ValueError if that is no longer possible."""

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
    """Compare all due techniques together; only if the result differs, one at a time.

    Raises:
        CannotRunError: Names the technique, the difference, and how the model deviates from transformers' own.
    """
    training = event == Event.BEFORE_FORWARD
    engaged = [t for t in techniques_of(state.algorithms) if isinstance(t, ParityCheckedTechnique) and t.engaged]
    due = [t for t in engaged if t._because is not None and (training or not t._evaluated)]
    if not due:
        return
    for technique in due:
        technique._evaluated = True
    trial = _Comparison(state, engaged, gradients=training)
    failure = ""
    try:
        changed, untouched = trial.changed_and_untouched(due)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        failure = first_line(error)
        for technique in reversed(due):
            technique.withdraw(state)
    if any_rank(trial.state.device, bool(failure)):
        for technique in due:
            reason = f"the comparison with the untouched model failed ({failure or 'on another rank'})"
            technique.unavailable(CannotRunError(technique.name, reason, _FIX))
        return
    difference = compare(untouched, changed, trial.tolerance)
    if not any_rank(trial.state.device, difference.beyond is not None):
        for technique in due:
            technique.reapply(state)
            technique.evidence["compared_with_untouched"] = difference.evidence() | {"because": technique._because}
    else:
        _find_the_cause(trial, due, untouched)
    for technique in due:
        if training:
            technique._because = None


def _find_the_cause(trial: _Comparison, due: Sequence[ParityCheckedTechnique], untouched: Outcome) -> None:
    """Reapply the techniques one at a time, and leave out each one that makes the model differ."""
    for technique in due:
        try:
            technique.reapply(trial.state)
        except ValueError as error:  # it depends on a technique that was left out
            technique.unavailable(CannotRunError(technique.name, str(error), "remove it for this model"))
            continue
        difference = compare(untouched, trial.outcome(), trial.tolerance)
        if not any_rank(trial.state.device, difference.beyond is not None):
            technique.evidence["compared_with_untouched"] = difference.evidence() | {"because": technique._because}
            continue
        technique.withdraw(trial.state)
        reason = f"{difference.beyond or 'another rank found a difference'} on the first batch"
        technique.unavailable(
            CannotRunError(
                technique.name,
                f"its result differs from the untouched model's: {reason} ({technique._because})",
                _FIX,
            )
        )


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

    def changed_and_untouched(self, techniques: Sequence[ParityCheckedTechnique]) -> tuple[Outcome, Outcome]:
        """Run the model with the techniques and then without them. They are withdrawn afterwards."""
        while True:
            try:
                changed = self.outcome()
                for technique in reversed(techniques):
                    technique.withdraw(self.state)
                return changed, self.outcome()
            except RuntimeError as error:
                try:
                    for technique in techniques:
                        technique.reapply(self.state)
                except ValueError:
                    raise error from None
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
        with forced("packed"):  # a difference is found here, not by the guard of later batches
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
