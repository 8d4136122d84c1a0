"""Base class of techniques that replace the run's optimizer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from composer.core import State
from torch.optim import Optimizer

from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.optimizer_evidence import StepWatch, only_optimizer, state_bytes, state_dtypes
from composer_speedups.core.technique import FSDP, Conflict, Stage, Technique
from composer_speedups.surgery.optimizer_swap import (
    UnfitOptimizerError,
    attach_schedulers,
    check_label,
    label_of,
)

__all__ = ["OptimizerSwapTechnique"]


class OptimizerSwapTechnique(Technique):
    """Replaces the optimizer at INIT, before Composer builds its schedulers, and checks that the new one steps.

    A subclass defines :meth:`swap`, which calls its function, and :meth:`effect`, which inspects the state after the
    first step. torch schedulers that the user built on the old optimizer are attached to the new one.
    """

    stage = Stage.OPTIMIZER
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(slot="optimizer implementation"),
        Conflict(FSDP, "the technique cannot replace the optimizer of sharded parameters"),
    )
    must_move: ClassVar[bool] = True  # whether a step at a learning rate above 1e-6 must change a parameter

    def reset(self) -> None:
        super().reset()
        self._old: Optimizer | None = None
        self._new: Optimizer | None = None
        self._label = ""

    @abstractmethod
    def swap(self, state: State) -> Optimizer:
        """Return the replacement of ``state.optimizers[0]``.

        Raises:
            UnfitOptimizerError: It cannot be replaced. Nothing may have been changed in that case.
        """

    @abstractmethod
    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        """Return evidence from the optimizer's state after a step.

        Raises:
            NotEngagedError: The state shows that the technique had no effect; raise :meth:`not_engaged`.
        """

    def engage(self, state: State) -> dict[str, Any]:
        if state.fsdp_config is not None or state.tp_config is not None:
            raise TechniqueError(
                self.name,
                "the technique cannot replace the optimizer of parameters that FSDP or tensor parallelism shards",
                "remove parallelism_config (DDP works), or remove it",
            )
        old = only_optimizer(self.name, state)
        try:
            new = self.swap(state)
        except UnfitOptimizerError as error:
            raise TechniqueError(self.name, error.reason, f"{error.fix}, or remove it") from error
        if self._new is not new:  # if the technique engages twice, the optimizer is already replaced
            self._old, self._new, self._label = old, new, label_of(new) or ""
            self._watch, self._old_watch = StepWatch(new), StepWatch(old)
            state.optimizers = new
        groups = new.param_groups
        return {
            "optimizer": self._label or label_of(new),
            "in_place_of": f"{type(old).__module__}.{type(old).__qualname__}",
            "groups": len(groups),
            "parameters": sum(p.numel() for group in groups for p in group["params"]),
        }

    def before_load(self, state: State) -> None:
        self._attach(state)

    def fit_start(self, state: State) -> None:  # fit() may be called with new schedulers
        self._attach(state)

    def _attach(self, state: State) -> None:
        if self._old is None or self._new is None:
            return
        try:
            attach_schedulers(state.schedulers, self._old, self._new)
        except UnfitOptimizerError as error:
            raise TechniqueError(self.name, error.reason, error.fix) from error
        if not self._verified:
            self._watch.reset()  # torch steps at learning rate 0 to prepare for loading or saving a state

    def after_load(self, state: State) -> None:
        if self._new is not None:
            try:
                check_label(self._new, self._label)
            except UnfitOptimizerError as error:
                raise TechniqueError(self.name, error.reason, error.fix) from error

    def verify(self, state: State) -> dict[str, Any]:
        fix = "leave state.optimizers as it is after INIT"
        if self._new is None or self._old is None:
            raise self.not_engaged("the optimizer was not swapped", "build the Trainer with torch.optim.AdamW")
        if self._old_watch.steps and self._old is not self._new:  # equal if it was replaced earlier
            raise self.not_engaged("the replaced optimizer is still stepping", fix)
        if not self._watch.steps:
            if state.precision.value == "amp_fp16":  # steps with overflowing gradients are skipped
                return {"optimizer_steps": 0}
            raise self.not_engaged(f"{self._label} took no step", fix)
        if self._watch.moved == 0 and self.must_move:
            raise self.not_engaged(f"a step of {self._label} moved no parameter", "look at its gradients")
        evidence: dict[str, Any] = {"optimizer_steps": self._watch.steps}
        if self._watch.moved is not None:
            evidence["parameters_moved"] = f"{self._watch.moved} of {self._watch.watched}"
        evidence["state_dtypes"] = state_dtypes(self._new)
        evidence["state_bytes"] = state_bytes(self._new)
        return evidence | self.effect(self._new, state)

    def close(self) -> None:
        if self._new is not None:
            self._watch.remove()
            self._old_watch.remove()
