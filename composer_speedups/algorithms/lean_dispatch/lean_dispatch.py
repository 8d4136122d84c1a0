"""The lean dispatch technique: events of Composer's Trainer that nobody hears cost nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_composer
from composer_speedups.core.technique import Order, Technique

if TYPE_CHECKING:
    from composer_speedups.algorithms.lean_dispatch.modules import LeanEvents
    from composer_speedups.core.run import FirstBatch, Run

_WHAT = "dispatching the Trainer's events"


class LeanDispatch(Technique):
    """Calls only those callbacks and algorithms at an event of Composer's Trainer that define a method for it.

    It also leaves out what Composer computes in every batch without need: the walk over all modules for
    ``State.fsdp_enabled``, ``torch.cuda.memory_stats`` without automatic micro-batches, a copy of the batch without
    training metrics, the split of a batch into one micro-batch, sums over a single rank, and most of
    ``Optimizer.zero_grad``; and it adds and compares times without looking up their units. Callbacks, algorithms and
    loggers run in the same order with the same arguments.

    Raises:
        Refusal: At INIT, in a training loop that differs from the tested version of Composer.
    """

    name = "lean_dispatch"
    order = Order.FLAGS
    effect = "exact"

    def reset(self) -> None:
        super().reset()
        self._events: LeanEvents | None = None

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from needs_composer(self.name, run, _WHAT)
        if not run.in_other_loop:
            from composer_speedups.algorithms.lean_dispatch.modules import replaced_by_other_code

            if (reason := replaced_by_other_code()) is not None:
                yield self.refusal(reason, "remove it")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.lean_dispatch.modules import LeanEvents

        assert run.state is not None
        self._events = LeanEvents(run.state)
        run.give_back(self._events.uninstall)
        self._events.install()
        return {}

    def proof(self, run: Run, seen: FirstBatch) -> dict[str, Any]:
        assert self._events is not None
        if not self._events.events:
            raise self.no_effect("Composer ran no event through it", "remove code that replaces Engine.run_event")
        return self._events.per_batch()

    def summary(self, run: Run) -> dict[str, Any]:
        assert self._events is not None
        return self._events.per_batch()
