"""Techniques that compute a model's result in another way, compared with the untouched model where that may differ.

A model that is transformers' own in every module needs no comparison: the parity tests are the proof. For any other,
the first micro-batch runs through the untouched model and through the changed one, before anything is trained.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import torch
from composer.core import Event, State, get_precision_context
from pydantic import Field
from torch import Tensor

from composer_speedups.core.comparison import SIXTEEN_BITS, Outcome, compare, measure, tolerance_of
from composer_speedups.core.errors import CannotRunError, first_line
from composer_speedups.core.technique import Technique, techniques_of
from composer_speedups.core.trainer_state import loss_of_this_rank, max_over_ranks, model_of, world_size
from composer_speedups.families.packed_tokens import token_masks
from composer_speedups.families.stock import changes_to

__all__ = ["Check", "ParityCheckedTechnique"]

Check = Literal["auto", "always", "never"]
_WAYS_OUT = "take it out for this model; or, if that is meant, set check: never"
_owners = itertools.count(1)
_INPUTS = ("attention_mask", "input_ids", "token_type_ids", "position_ids", "inputs_embeds")


class ParityCheckedTechnique(Technique):
    """A technique that can be taken out of a model and put back, and is compared with the untouched model.

    Raises:
        CannotRunError: In the first micro-batch, when the changed model computes something else.
    """

    not_recorded = (*Technique.not_recorded, "check")

    _: KW_ONLY
    check: Check = Field("auto")
    """Compare loss, outputs and gradients of the first micro-batch with the untouched model's: where the model is not
    transformers' own in every module (auto), always or never."""

    def reset(self) -> None:
        super().reset()
        self.owner = next(_owners)  # of what it changed in a model: an earlier Trainer's end must not undo it
        self._because: str | None = None  # why a comparison is due; None when it is not, or is done
        self._evaluated = False  # outputs were compared, in an evaluation

    @abstractmethod
    def withdraw(self, state: State) -> None:
        """Give the model back what it had; also when the Trainer closes."""

    @abstractmethod
    def reapply(self, state: State) -> None:
        """Change the model again as :meth:`engage` did; ValueError when it no longer can be."""

    def close(self) -> None:
        state = self._state() if self._state is not None else None
        if state is not None and self.applied:
            self.withdraw(state)

    @property
    def compares_in_the_runs_precision(self) -> bool:
        """Whether it is compared in the precision that it trains in, and not in float32."""
        return False

    def own_batch(self, batch: Any) -> Any:
        """A batch without what the technique itself put into it."""
        return batch

    def before_engaging(self, state: State) -> None:
        if self.check == "always":
            self._because = "check: always"
        elif self.check == "auto":
            self._because = next(iter(changes_to(state.model)), None)

    def before_first_forward(self, event: Event, state: State) -> None:
        compare_with_untouched(event, state)


def compare_with_untouched(event: Event, state: State) -> None:
    """Compare all techniques of a Trainer that are due at once; one by one only where something differs.

    Raises:
        CannotRunError: Names the technique, what differs, and how the model differs from transformers' own.
    """
    training = event == Event.BEFORE_FORWARD
    engaged = [t for t in techniques_of(state.algorithms) if isinstance(t, ParityCheckedTechnique) and t.engaged]
    due = [t for t in engaged if t._because is not None and (training or not t._evaluated)]
    if not due:
        return
    for technique in due:
        technique._evaluated = True
    trial = _Trial(state, engaged, gradients=training)
    try:
        changed, untouched = trial.changed_and_untouched(due)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        for technique in reversed(due):
            technique.withdraw(state)
        for technique in due:
            reason = f"the model could not be compared with the untouched one ({first_line(error)})"
            technique.unavailable(CannotRunError(technique.name, reason, _WAYS_OUT))
        return
    apart = compare(untouched, changed, trial.tolerance)
    if not trial.any_rank(apart.beyond is not None):
        for technique in due:
            technique.reapply(state)
            technique.evidence["compared_with_untouched"] = apart.evidence() | {"because": technique._because}
    else:
        _find_the_cause(trial, due, untouched)
    for technique in due:
        if training:
            technique._because = None


def _find_the_cause(trial: _Trial, due: Sequence[ParityCheckedTechnique], untouched: Outcome) -> None:
    """Put the techniques back in turn; one with which the model differs stays out."""
    for technique in due:
        try:
            technique.reapply(trial.state)
        except ValueError as error:  # it builds on one that stays out
            technique.unavailable(CannotRunError(technique.name, str(error), "take it out for this model"))
            continue
        apart = compare(untouched, trial.outcome(), trial.tolerance)
        if not trial.any_rank(apart.beyond is not None):
            technique.evidence["compared_with_untouched"] = apart.evidence() | {"because": technique._because}
            continue
        technique.withdraw(trial.state)
        reason = f"{apart.beyond or 'another rank found a difference'} on the first batch"
        technique.unavailable(
            CannotRunError(
                technique.name,
                f"the model does not compute what it does untouched: {reason} ({technique._because})",
                _WAYS_OUT,
            )
        )


class _Trial:
    """One micro-batch, run as often as is needed; of one that does not fit untouched, a part."""

    def __init__(self, state: State, techniques: Sequence[ParityCheckedTechnique], *, gradients: bool) -> None:
        self.state = state
        self._batch = state.batch
        for technique in techniques:
            self._batch = technique.own_batch(self._batch)
        self._batch = _with_padding(self._batch)
        self._sharded = state.fsdp_config is not None or state.tp_config is not None
        self._gradients = gradients and not self._sharded  # of a shard, autograd alone computes none
        self._with_loss = gradients
        self._model: Any = state.model if self._sharded else model_of(state)
        coarse = any(technique.compares_in_the_runs_precision for technique in techniques)
        self.tolerance = SIXTEEN_BITS if coarse else tolerance_of(self._model)

    @property
    def _mask(self) -> Tensor | None:
        """The batch's attention mask, (B, S); of several texts a sample one after another."""
        mask = token_masks(self._batch).get("attention_mask")
        return None if mask is None else mask.flatten(1)

    def changed_and_untouched(self, techniques: Sequence[ParityCheckedTechnique]) -> tuple[Outcome, Outcome]:
        """What the model computes now, and without the techniques, which are withdrawn afterwards."""
        while True:
            try:
                changed = self.outcome()
                for technique in reversed(techniques):
                    technique.withdraw(self.state)
                return changed, self.outcome()
            except RuntimeError as error:
                for technique in techniques:
                    technique.reapply(self.state)
                if not isinstance(error, torch.OutOfMemoryError) or self._sharded:
                    raise
                if world_size() > 1 and not _loss_is_known(self._model):
                    raise torch.OutOfMemoryError(
                        f"the comparison with the untouched model ran out of memory ({first_line(error)}), and one of "
                        f"{world_size()} ranks cannot repeat it in part, since the model's loss may gather samples "
                        "from the others; lower the micro-batch, or set check: never"
                    ) from error
                if not self._halve():
                    raise

    def _halve(self) -> bool:
        """Keep the first half of the rows; whether that is possible."""
        rows = 0 if self._mask is None else len(self._mask)
        if rows < 2 or any(not isinstance(v, Sequence | Tensor) or len(v) != rows for v in self._batch.values()):
            return False
        self._batch = {name: value[: rows // 2] for name, value in self._batch.items()}
        torch.cuda.empty_cache()
        return True

    def outcome(self) -> Outcome:
        return measure(self._model, self._call, self._mask, gradients=self._gradients)

    def any_rank(self, found: bool) -> bool:
        """Whether it is so on any rank: all of them then do the same."""
        return bool(max_over_ranks(self.state.device, int(found)))

    def _call(self) -> tuple[Any, Tensor | None]:
        if self.tolerance is SIXTEEN_BITS:  # float32 is not what it computes in
            with get_precision_context(self.state.precision, self.state.precision_config):
                return self._forward()
        return self._forward()

    def _forward(self) -> tuple[Any, Tensor | None]:
        outputs = self._model(self._batch)
        if not self._with_loss:
            return outputs, None
        with loss_of_this_rank():  # another rank may have fewer rows by now
            found = model_of(self.state).loss(outputs, self._batch)
        if isinstance(found, Tensor):
            return outputs, found
        losses = list(found.values()) if isinstance(found, dict) else list(found)
        return outputs, torch.stack(losses).sum()


def _loss_is_known(model: Any) -> bool:
    """Whether the loss is of this package or of Composer, and asks :func:`.loss_ranks` before it gathers anything."""
    methods = [type(each).loss for each in (model, getattr(model, "task", model))]
    return all(method.__module__.partition(".")[0] in ("composer", "composer_speedups") for method in methods)


def _with_padding(batch: Any) -> Any:
    """The batch with half of its first row as padding where it has none: a later one will, and a head may read it.

    It stays as it is where something else in it goes with the slots, such as a label for each of them.
    """
    if not isinstance(batch, dict):
        return batch
    tensors = {str(name): value for name, value in batch.items() if isinstance(value, Tensor)}
    masks = token_masks(tensors)
    for name, value in tensors.items():
        per_token = any(value.shape[: mask.ndim] == mask.shape for mask in masks.values())
        if per_token and not any(each in name for each in _INPUTS):
            return batch
    if any(not bool(mask.all()) for mask in masks.values()):
        return batch
    padded = {name: mask.clone() for name, mask in masks.items()}
    for mask in padded.values():
        mask[:1, ..., (mask.shape[-1] + 1) // 2 :] = 0
    return {**batch, **padded}
