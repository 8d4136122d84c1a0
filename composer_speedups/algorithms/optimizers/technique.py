"""The base class of the optimizer techniques: the only file of this folder that knows the contract of techniques."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from composer.core import Precision, State

from composer_speedups.algorithms.optimizers.kinds import KINDS, Kind
from composer_speedups.algorithms.optimizers.proof import Observed, prove
from composer_speedups.algorithms.optimizers.swap import UnfitOptimizerError, attach_schedulers
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.requirements import Context, Requirement
from composer_speedups.core.technique import FSDP, Conflict, Stage, Technique
from composer_speedups.core.trainer_state import model_of

__all__ = ["SLOT", "OptimizerTechnique"]

SLOT = Conflict(slot="optimizer implementation")


class OptimizerTechnique(Technique):
    """Changes or replaces the optimizer at INIT, as the kind of that name says, and checks its first step.

    It engages before Composer builds its schedulers. torch schedulers that the user built on the old optimizer are
    attached to the new one. A subclass declares its name, its settings and how it changes the result.
    """

    stage = Stage.OPTIMIZER
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        SLOT,
        Conflict(FSDP, "the technique cannot replace the optimizer of sharded parameters"),
    )

    def reset(self) -> None:
        super().reset()
        self._old: Any = None
        self._new: Any = None
        self._observed: Observed | None = None

    @property
    def kind(self) -> Kind:
        names = (field.name for field in fields(self) if field.name != "on_unavailable")
        return KINDS[self.name](**{name: getattr(self, name) for name in names})

    def requirements(self, context: Context) -> Iterable[Requirement]:
        return self.kind.needs(context)

    def engage(self, state: State) -> dict[str, Any]:
        if len(state.optimizers) != 1:
            reason = f"there are {len(state.optimizers)} optimizers"
            raise TechniqueError(self.name, reason, "give the Trainer one, or remove the technique")
        (old,) = state.optimizers
        parameters = [p for group in old.param_groups for p in group["params"]]
        if not any(p.requires_grad for p in parameters):
            reason = "the optimizer has no trainable parameter"
            raise TechniqueError(self.name, reason, "train at least one, or remove the technique")
        kind, groups = self.kind, len(old.param_groups)
        with self._refused(", or remove it"):
            new = kind.build(old, state.model)
        self._old, self._new, state.optimizers = old, new, new
        replaced = f"{type(old).__module__}.{type(old).__qualname__}"
        size = sum(p.numel() for p in parameters)
        return {"optimizer": kind.label, "in_place_of": replaced, "groups": groups, "parameters": size}

    def before_load(self, state: State) -> None:
        with self._refused():
            attach_schedulers(state.schedulers, self._old, self._new)

    def after_load(self, state: State) -> None:
        with self._refused():
            self.kind.loaded(self._new)

    def fit_start(self, state: State) -> None:
        self.before_load(state)  # fit() may be called with new schedulers
        if not self._verified:  # earlier steps are torch's, at learning rate 0, to prepare for loading a state
            self.close()
            self._observed = Observed(self._new, operators=bool(self.kind.flag))

    def verify(self, state: State) -> dict[str, Any]:
        kind, seen = self.kind, self._observed
        if seen is None or not seen.steps or (state.precision == Precision.AMP_FP16 and not seen.moved):
            if state.precision == Precision.AMP_FP16:
                note = "no optimizer step was seen; fp16 skips steps whose gradients overflow"
                return {"note": note} if self.ended else {}
            raise self.not_engaged(f"{kind.label} took no step", "leave state.optimizers as it is after INIT")
        if seen.moved:
            seen.close()
        self.evidence.pop("note", None)  # of an earlier fit
        try:
            return prove(kind, seen, self._new, model_of(state))
        except UnfitOptimizerError as error:
            raise self.not_engaged(error.reason, error.fix) from error

    def export(self, state: State, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        return self.kind.exported(model_of(state).model, weights)

    def close(self) -> None:
        super().close()
        if self._observed is not None:
            self._observed.close()

    @contextmanager
    def _refused(self, alternative: str = "") -> Iterator[None]:
        """Turn an UnfitOptimizerError into a TechniqueError; ``alternative`` is added to its fix."""
        try:
            yield
        except UnfitOptimizerError as error:
            raise TechniqueError(self.name, error.reason, error.fix + alternative) from error
