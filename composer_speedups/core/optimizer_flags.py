"""Base class of techniques that select an implementation of the existing optimizer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from composer.core import Precision, State

from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.operator_recorder import OperatorRecorder
from composer_speedups.core.optimizer_evidence import only_optimizer
from composer_speedups.core.technique import Conflict, Stage, Technique
from composer_speedups.surgery.optimizer_hooks import start_after_closure
from composer_speedups.surgery.optimizer_implementation import Implementation, set_implementation
from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError

__all__ = ["OptimizerFlagTechnique"]


class OptimizerFlagTechnique(Technique):
    """A technique that sets a flag of torch's optimizer, and checks by the executed operators that it took effect."""

    stage = Stage.OPTIMIZER
    exactness = "rounding"
    conflicts = (Conflict(slot="optimizer implementation"),)
    implementation: ClassVar[Implementation]
    operator: ClassVar[str]  # prefix of the aten operators that prove it

    def reset(self) -> None:
        super().reset()
        self._recorder = OperatorRecorder()
        self._recording = self._recorded = False
        self._hooks: list[Any] = []

    def engage(self, state: State) -> dict[str, Any]:
        optimizer = only_optimizer(self.name, state)
        changed = self._set(optimizer)
        if not self._hooks:
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        return changed

    def after_load(self, state: State) -> None:
        self._set(state.optimizers[0])  # loading a checkpoint restores the flags it was written with

    def postpone(self) -> None:
        super().postpone()
        if self._postponed:
            self._recorder, self._recorded = OperatorRecorder(), False

    def _set(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        try:
            return set_implementation(optimizer, self.implementation)
        except UnfitOptimizerError as error:
            raise TechniqueError(self.name, error.reason, f"{error.fix}, or remove it") from error

    def _before_step(self, _optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Start recording at the update itself, because Composer's closure also runs the forward and backward pass."""
        return None if self._recorded else start_after_closure(args, kwargs, self._start)

    def _start(self) -> None:
        self._recorder.__enter__()
        self._recording = True

    def _after_step(self, *_: Any) -> None:
        if self._recording:
            self._recorder.__exit__(None, None, None)
            self._recording, self._recorded = False, True

    def verify(self, state: State) -> dict[str, Any]:
        if not self._recorded:
            if state.precision == Precision.AMP_FP16:  # it skips steps with overflowing gradients
                note = "no optimizer step was seen; fp16 skips steps whose gradients overflow"
                return {"note": note} if self.ended else {}
            raise self.not_engaged("the optimizer it changed never stepped", "leave state.optimizers after INIT")
        for hook in self._hooks:
            hook.remove()
        ran = self.operators(state)
        if not ran:
            raise self.not_engaged(
                f"the first step ran no {self.operator}* operator", "keep the optimizer's flags as they are"
            )
        self.evidence.pop("note", None)  # of an earlier fit
        return {"operators_in_one_step": ran}

    def operators(self, state: State) -> dict[str, int]:
        """Operators of the first step that prove that the implementation ran, and how often."""
        return {name: n for name, n in self._recorder.counts.items() if name.startswith(self.operator)}

    def close(self) -> None:
        self._after_step()  # the recorder is still active if a step raised
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
