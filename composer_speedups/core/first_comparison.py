"""Compare the first rows of a run with the untouched model, before anything is trained.

A model whose modules are all exactly transformers' own is not compared: the parity tests cover it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_speedups.core.errors import Refusal, first_line
from composer_speedups.core.run import Run
from composer_speedups.core.stock import changes_to
from composer_speedups.core.technique import ComparedTechnique
from composer_speedups.core.trainer_state import any_rank, model_of
from composer_speedups.kernels.common import uncounted
from composer_speedups.packing.comparison import SIXTEEN_BITS, compare, measure, tolerance_of, with_padding
from composer_speedups.packing.rows import token_masks
from composer_speedups.packing.untouched import untouched

if TYPE_CHECKING:
    from composer.core import State

_ROWS = 16
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
        model: Any = state.model if self._run.sharded else model_of(state)
        tolerance = SIXTEEN_BITS if any(t.needs_16_bits for t in due) else tolerance_of(model)
        # otherwise in float32; and autograd.grad returns no gradients of FSDP's shards
        sixteen, gradients = tolerance is SIXTEEN_BITS, training and not self._run.sharded
        failure, batch = "", with_padding(_first_rows(state.batch))
        mask = token_masks(batch).get("attention_mask")  # with several texts per sample, (B, texts, S)
        call = partial(_call, model, batch, state, sixteen=sixteen, training=training)
        outcome = partial(measure, model, call, None if mask is None else mask.flatten(1), gradients=gradients)
        try:
            with uncounted():
                changed = outcome()
                with untouched(model):
                    stock = outcome()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failure = first_line(error)
        if any_rank(state.device, bool(failure)):
            reason = f"the comparison with the untouched model failed ({failure or 'on another rank'})"
            raise Refusal(names, reason, _FIX)
        difference = compare(stock, changed, tolerance)
        if any_rank(state.device, difference.beyond is not None):
            beyond = f"{difference.beyond or 'another rank found a difference'} on the first batch"
            raise Refusal(names, f"its result differs from the untouched model's: {beyond} ({because})", _FIX)
        for technique, reason in due.items():
            technique.evidence["compared_with_untouched"] = difference.evidence() | {"because": reason}


def _call(model: Any, batch: Any, state: State, *, sixteen: bool, training: bool) -> tuple[Any, Tensor | None]:
    from composer.core import get_precision_context

    with get_precision_context(state.precision, state.precision_config) if sixteen else nullcontext():
        outputs = model(batch)
        loss = model_of(state).loss(outputs, batch) if training else None
    if loss is None or isinstance(loss, Tensor):
        return outputs, loss
    return outputs, torch.stack([*(loss.values() if isinstance(loss, dict) else loss)]).sum()


def _first_rows(batch: Any) -> Any:
    """At most 16 rows, since the untouched model in float32 needs more memory than training; the whole batch if not
    all of its values have one entry per row."""
    rows = len(next(iter(token_masks(batch).values()), ()))
    if not rows or any(not isinstance(v, Sequence | Tensor) or len(v) != rows for v in batch.values()):
        return batch
    return {name: value[:_ROWS] for name, value in batch.items()}
