"""The early loss technique: Composer reads the logged loss as soon as it is known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_composer, needs_cuda
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.technique import Order, Technique


class EarlyLoss(Technique):
    """Makes Composer read each batch's loss when it is known, instead of at the end of the batch.

    Then the host prepares the next batch while the GPU computes gradients. The logged values are the same.

    Raises:
        Refusal: At INIT, without a GPU, in a training loop that differs from the tested versions of Composer, or on
            ranks that have only NCCL, which synchronizes with the GPU, and that gloo cannot connect.
    """

    name = "early_loss"
    order = Order.FLAGS
    effect = "exact"

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from needs_composer(self.name, run, "reading the loss before the batch is over")
        yield from needs_cuda(self.name, run, "reading the loss before the batch is over")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.distributed.host_scalars import Interception

        assert run.state is not None
        try:
            self._interception = Interception(run.state.device)
            self._interception.install()  # collective, if gloo must connect the ranks
        except ValueError as error:
            reason, _, fix = str(error).partition("; ")
            raise self.refusal(reason, fix or "remove it") from error
        run.give_back(self._interception.undo)
        return {}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        first = self._interception.readback.first
        if first is None:
            raise self.no_effect("Composer read no loss through it", "remove code that replaces the Trainer's loop")
        value, on_device = first
        if value != on_device and not (math.isnan(value) and math.isnan(on_device)):
            raise self.no_effect(f"it read {value}, and the GPU has {on_device}", "report this as a bug")
        return self.summary(run)

    def summary(self, run: Run) -> dict[str, Any]:
        readback = self._interception.readback
        return {"losses_read": readback.reads, "read_before_the_batch_was_over": readback.early_reads}
