"""Compare the first micro-batch of a run with the untouched model, before anything is trained.

A model whose modules are all exactly transformers' own is not compared: the parity tests cover it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_speedups.core.errors import Refusal, first_line
from composer_speedups.core.run import Run
from composer_speedups.core.stock import changes_to
from composer_speedups.core.technique import ComparedTechnique
from composer_speedups.core.trainer_state import any_rank, loss_of_this_rank, model_of, world_size
from composer_speedups.kernels.common import uncounted
from composer_speedups.packing.comparison import SIXTEEN_BITS, Outcome, compare, measure, tolerance_of, with_padding
from composer_speedups.packing.rows import token_masks
from composer_speedups.packing.untouched import untouched

if TYPE_CHECKING:
    from composer.core import State

_FIX = "remove it for this model; or, if the difference is intended, set check: never"


class Comparison:
    """The comparison of a run's model with the untouched one. It is decided before the techniques engage."""

    def __init__(self, run: Run) -> None:
        self.due: dict[ComparedTechnique, str] = {}  # the techniques to compare, and why
        self._run, self._evaluated = run, False
        compared = [t for t in run.techniques.values() if isinstance(t, ComparedTechnique) and t.check != "never"]
        change = next(iter(changes_to(run.model)), None) if any(t.check == "auto" for t in compared) else None
        for technique in compared:
            because = "check: always" if technique.check == "always" else change
            if because is not None:
                self.due[technique] = because

    def make(self, state: State, *, training: bool) -> None:
        """Compare before the first forward pass, and again before the first one that trains; refuse a difference."""
        due = {technique: because for technique, because in self.due.items() if technique.engaged}
        if not due or (self._evaluated and not training):
            return
        self._evaluated = True
        if training:
            self.due = {}
        names, because = ", ".join(technique.name for technique in due), next(iter(due.values()))
        failure, batch = "", _Batch(state, self._run, training)
        if any(technique.needs_16_bits for technique in due):
            batch.tolerance = SIXTEEN_BITS
        try:
            with uncounted():
                changed, stock = batch.changed_and_untouched()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failure = first_line(error)
        if any_rank(state.device, bool(failure)):
            reason = f"the comparison with the untouched model failed ({failure or 'on another rank'})"
            raise Refusal(names, reason, _FIX)
        difference = compare(stock, changed, batch.tolerance)
        if any_rank(state.device, difference.beyond is not None):
            beyond = f"{difference.beyond or 'another rank found a difference'} on the first batch"
            raise Refusal(names, f"its result differs from the untouched model's: {beyond} ({because})", _FIX)
        for technique, reason in due.items():
            technique.evidence["compared_with_untouched"] = difference.evidence() | {"because": reason}


class _Batch:
    """One micro-batch that runs twice, with half of its rows if a run does not fit into memory, and so on."""

    def __init__(self, state: State, run: Run, training: bool) -> None:
        self._state, self._run, self._training = state, run, training
        self._batch = with_padding(state.batch)
        self._model: Any = state.model if run.sharded else model_of(state)
        self.tolerance = tolerance_of(self._model)

    @property
    def _mask(self) -> Tensor | None:
        """The batch's attention mask (B, S); with several texts per sample, their masks are concatenated along S."""
        mask = token_masks(self._batch).get("attention_mask")
        return None if mask is None else mask.flatten(1)

    def changed_and_untouched(self) -> tuple[Outcome, Outcome]:
        while True:
            try:
                changed = self._outcome()
                with untouched(self._model):
                    return changed, self._outcome()
            except torch.OutOfMemoryError as error:
                if world_size() > 1 and not _loss_respects_loss_ranks(self._model):
                    raise torch.OutOfMemoryError(
                        f"the comparison with the untouched model ran out of memory ({first_line(error)}), and one of "
                        f"{world_size()} ranks cannot repeat it with fewer samples, since its loss may gather samples "
                        "from the others; lower the micro-batch, or set check: never"
                    ) from error
                if self._run.sharded or not self._halve():
                    raise

    def _halve(self) -> bool:
        """Keep the first half of the rows, and return whether that was possible."""
        rows = 0 if self._mask is None else len(self._mask)
        of_rows = {name: v for name, v in self._batch.items() if not isinstance(v, Tensor) or v.ndim}  # or of the batch
        if rows < 2 or any(not isinstance(v, Sequence | Tensor) or len(v) != rows for v in of_rows.values()):
            return False
        self._batch = {**self._batch, **{name: value[: rows // 2] for name, value in of_rows.items()}}
        torch.cuda.empty_cache()
        return True

    def _outcome(self) -> Outcome:
        gradients = self._training and not self._run.sharded  # autograd.grad returns none of FSDP's shards
        return measure(self._model, self._call, self._mask, gradients=gradients)

    def _call(self) -> tuple[Any, Tensor | None]:
        from composer.core import get_precision_context

        precise = self.tolerance is not SIXTEEN_BITS  # otherwise compared in the precision of training
        in_training = get_precision_context(self._state.precision, self._state.precision_config)
        with nullcontext() if precise else in_training, loss_of_this_rank():  # other ranks may have halved their batch
            outputs = self._model(self._batch)
            loss = model_of(self._state).loss(outputs, self._batch) if self._training else None
        if loss is None or isinstance(loss, Tensor):
            return outputs, loss
        return outputs, torch.stack([*(loss.values() if isinstance(loss, dict) else loss)]).sum()


def _loss_respects_loss_ranks(model: Any) -> bool:
    """Whether the loss is defined by this package or by Composer, which call :func:`.loss_ranks` before they gather."""
    methods = [type(owner).loss for owner in (model, getattr(model, "task", model))]
    return all(method.__module__.partition(".")[0] in ("composer", "composer_speedups") for method in methods)
