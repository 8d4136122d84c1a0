"""The early loss technique: Composer reads the logged loss as soon as it is known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from composer.core import State

from composer_speedups.algorithms.early_loss.functional import apply_early_loss
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import Stage, Technique
from composer_speedups.distributed.host_scalars import Interception


class EarlyLoss(Technique):
    """Makes Composer read each batch's loss when it is known, instead of at the end of the batch.

    Then the host prepares the next batch while the GPU computes gradients. The logged values are the same.

    Raises:
        TechniqueError: At INIT, without a GPU, with a training loop that differs from the tested versions of Composer,
            or on ranks that have only NCCL, which synchronizes with the GPU, and that gloo cannot connect.
    """

    name = "early_loss"
    stage = Stage.FLAGS
    exactness = "exact"
    gain = 1.2

    def reset(self) -> None:
        super().reset()
        self._interception: Interception | None = None

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_cuda(context, "reading the loss before the batch is over")

    def engage(self, state: State) -> dict[str, Any]:
        try:
            self._interception = apply_early_loss(state.device)
        except ValueError as error:
            reason, _, fix = str(error).removeprefix("early_loss ").partition("; ")
            raise TechniqueError(self.name, reason, fix or "remove it") from error
        return {}

    def before_forward(self, state: State) -> None:
        if self._interception is not None:
            self._interception.readback.begin_microbatch()

    def verify(self, state: State) -> dict[str, Any]:
        assert self._interception is not None
        readback = self._interception.readback
        if readback.first is None:
            raise self.not_engaged("Composer read no loss through it", "remove code that replaces the Trainer's loop")
        value, on_device = readback.first
        if not math.isclose(value, float(on_device), rel_tol=1e-6):  # the order of the sum over ranks may differ
            raise self.not_engaged(f"it read {value}, and the GPU has {float(on_device)}", "report this as a bug")
        reads, early = readback.reads, readback.early_reads
        evidence: dict[str, Any] = {"losses_read": reads, "read_before_the_batch_was_over": early}
        if self.ended and 2 * early < reads:
            evidence["note"] = (
                "most batches had ended when the host read their loss: this GPU does not wait for the host"
            )
        return evidence

    def close(self) -> None:
        if self._interception is not None:
            self._interception.undo()
