"""The base class of the optimizer techniques: the only file of this folder that knows the contract of techniques."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from composer_speedups.algorithms.optimizers import TECHNIQUES
from composer_speedups.core.errors import Refusal
from composer_speedups.core.technique import FSDP, NOT_YET, Order, Technique

if TYPE_CHECKING:
    from composer_speedups.algorithms.optimizers.kinds import Kind
    from composer_speedups.core.run import FirstBatch, Run

ONE_OPTIMIZER: Mapping[str, str] = dict.fromkeys(TECHNIQUES, "each sets the optimizer")


class OptimizerTechnique(Technique):
    """Changes or replaces the optimizer at INIT, as the kind of that name says, and checks its first step.

    It engages before Composer builds its schedulers. torch schedulers that the user built on the old optimizer are
    attached to the new one. A subclass declares its name, its settings and how it changes the result.
    """

    order = Order.OPTIMIZER
    not_with: ClassVar[Mapping[str, str]] = {
        **ONE_OPTIMIZER,
        FSDP: "the technique cannot replace the optimizer of sharded parameters",
    }

    def reset(self) -> None:
        super().reset()
        self._old: Any = None
        self._new: Any = None

    @property
    def kind(self) -> Kind:
        from composer_speedups.algorithms.optimizers.kinds import KINDS

        return KINDS[self.name](
            **{name: getattr(self, name) for name in type(self).model_fields if name != "on_unavailable"}
        )

    def needs(self, run: Run) -> Iterable[Refusal]:
        if run.in_other_loop and not run.optimizers:
            yield self.refusal("it needs the loop's optimizer", "pass it to apply")
        yield from self.kind.needs(run)

    def engage(self, run: Run) -> dict[str, Any]:
        if len(run.optimizers) != 1:
            reason = f"there are {len(run.optimizers)} optimizers"
            raise self.refusal(reason, "give the Trainer one, or remove the technique")
        (old,) = run.optimizers
        parameters = [p for group in old.param_groups for p in group["params"]]
        if not any(p.requires_grad for p in parameters):
            reason = "the optimizer has no trainable parameter"
            raise self.refusal(reason, "train at least one, or remove the technique")
        kind, groups = self.kind, len(old.param_groups)
        with self._refused(", or remove it"):
            new = kind.build(old, run.model)
        self._old, self._new, run.optimizers = old, new, [new]
        replaced = f"{type(old).__module__}.{type(old).__qualname__}"
        size = sum(p.numel() for p in parameters)
        return {"optimizer": kind.label, "in_place_of": replaced, "groups": groups, "parameters": size}

    def before_load(self, run: Run) -> None:
        from composer_speedups.algorithms.optimizers.swap import attach_schedulers

        assert run.state is not None
        with self._refused():
            attach_schedulers(run.state.schedulers, self._old, self._new)

    fit_start = before_load  # fit() may be called with new schedulers

    def after_load(self, run: Run) -> None:
        with self._refused():
            self.kind.loaded(self._new)

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        from composer_speedups.algorithms.optimizers.proof import prove
        from composer_speedups.algorithms.optimizers.swap import UnfitOptimizerError

        kind = self.kind
        if not seen.steps:
            raise self.no_effect(f"{kind.label} took no step", "leave state.optimizers as it is after INIT")
        if seen.moved is None and not seen.ended:
            return NOT_YET  # the learning rate warms up from 0
        try:
            return prove(kind, seen, self._new, run.model)
        except UnfitOptimizerError as error:
            raise self.no_effect(error.reason, error.fix) from error

    def export(self, run: Run, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        return self.kind.exported(run.model.model, weights)

    @contextmanager
    def _refused(self, alternative: str = "") -> Iterator[None]:
        """Turn an UnfitOptimizerError into a Refusal; ``alternative`` is added to its fix."""
        from composer_speedups.algorithms.optimizers.swap import UnfitOptimizerError

        try:
            yield
        except UnfitOptimizerError as error:
            raise self.refusal(error.reason, error.fix + alternative) from error
