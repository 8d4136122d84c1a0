"""Base classes of techniques that replace the run's optimizer, or select an implementation of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from composer.core import Precision, State
from torch import nn
from torch.optim import Optimizer

from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.operator_recorder import OperatorRecorder
from composer_speedups.core.optimizer_evidence import (
    StepWatch,
    count_state_bits,
    embedding_weights,
    state_bytes,
    state_dtypes,
)
from composer_speedups.core.technique import FSDP, Conflict, Stage, Technique
from composer_speedups.surgery.optimizer_hooks import start_after_closure
from composer_speedups.surgery.optimizer_implementation import Implementation, set_implementation
from composer_speedups.surgery.optimizer_swap import (
    UnfitOptimizerError,
    attach_schedulers,
    check_label,
    label_of,
)

__all__ = ["OptimizerFlagTechnique", "OptimizerSwapTechnique"]


class _OptimizerTechnique(Technique):
    stage = Stage.OPTIMIZER
    conflicts: ClassVar[tuple[Conflict, ...]] = (Conflict(slot="optimizer implementation"),)

    def only_optimizer(self, state: State) -> Optimizer:
        """The run's optimizer.

        Raises:
            TechniqueError: There is none, which is what Composer makes of a model without parameters, there are
                several, or none of its parameters is trainable, so it would never step.
        """
        if len(state.optimizers) != 1:
            reason = f"there are {len(state.optimizers)} optimizers"
            raise TechniqueError(self.name, reason, "give the Trainer one, or remove the technique")
        (optimizer,) = state.optimizers
        if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
            reason = "the optimizer has no trainable parameter"
            raise TechniqueError(self.name, reason, "train at least one, or remove the technique")
        return optimizer

    @contextmanager
    def unfit_refused(self, alternative: str = ", or remove it") -> Iterator[None]:
        """Turn an UnfitOptimizerError into a TechniqueError; ``alternative`` is added to its fix."""
        try:
            yield
        except UnfitOptimizerError as error:
            raise TechniqueError(self.name, error.reason, error.fix + alternative) from error


class OptimizerFlagTechnique(_OptimizerTechnique):
    """Sets a flag of torch's optimizer, and checks by the executed operators that it took effect."""

    exactness = "rounding"
    implementation: ClassVar[Implementation]
    operator: ClassVar[str]  # prefix of the aten operators that prove it

    def reset(self) -> None:
        super().reset()
        self._recorder = OperatorRecorder()
        self._recording = self._recorded = False
        self._hooks: list[Any] = []

    def set_flag(self, optimizer: Optimizer) -> dict[str, Any]:
        """Change the optimizer, and return evidence. Raises UnfitOptimizerError if it does not support the flag."""
        return set_implementation(optimizer, self.implementation)

    def engage(self, state: State) -> dict[str, Any]:
        optimizer = self.only_optimizer(state)
        with self.unfit_refused():
            changed = self.set_flag(optimizer)
        if not self._hooks:
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        return changed

    def after_load(self, state: State) -> None:
        with self.unfit_refused():
            self.set_flag(state.optimizers[0])  # loading a checkpoint restores the flags it was written with

    def postpone(self) -> None:
        super().postpone()
        if self._postponed:
            self._recorder, self._recorded = OperatorRecorder(), False

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
        self.close()
        operators = self.operators(state)
        if not operators:
            raise self.not_engaged(
                f"the first step ran no {self.operator}* operator", "keep the optimizer's flags as they are"
            )
        self.evidence.pop("note", None)  # of an earlier fit
        return {"operators_in_one_step": operators}

    def operators(self, state: State) -> dict[str, int]:
        """Operators of the first step that prove that the implementation ran, and how often."""
        return {name: n for name, n in self._recorder.counts.items() if name.startswith(self.operator)}

    def close(self) -> None:
        self._after_step()  # the recorder is still active if a step raised
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class OptimizerSwapTechnique(_OptimizerTechnique):
    """Replaces the optimizer at INIT, before Composer builds its schedulers, and checks that the new one steps.

    A subclass defines :meth:`swap`, which calls its function, and :meth:`effect`, which inspects the state after the
    first step. torch schedulers that the user built on the old optimizer are attached to the new one.
    """

    conflicts = (
        *_OptimizerTechnique.conflicts,
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
        old = self.only_optimizer(state)
        with self.unfit_refused():
            new = self.swap(state)
        if self._new is not new:  # if the technique engages twice, the optimizer is already replaced
            self._old, self._new, self._label = old, new, label_of(new) or ""
            self._watch, self._old_watch = StepWatch(new), StepWatch(old)
            state.optimizers = new
        groups = new.param_groups
        return {
            "optimizer": self._label,
            "in_place_of": f"{type(old).__module__}.{type(old).__qualname__}",
            "groups": len(groups),
            "parameters": sum(p.numel() for group in groups for p in group["params"]),
        }

    def before_load(self, state: State) -> None:
        self._attach(state)

    def fit_start(self, state: State) -> None:  # fit() may be called with new schedulers
        self._attach(state)

    def _attach(self, state: State) -> None:
        assert self._old is not None
        assert self._new is not None
        with self.unfit_refused(alternative=""):
            attach_schedulers(state.schedulers, self._old, self._new)
        if not self._verified:
            self._watch.reset()  # torch steps at learning rate 0 to prepare for loading or saving a state

    def after_load(self, state: State) -> None:
        assert self._new is not None
        with self.unfit_refused(alternative=""):
            check_label(self._new, self._label)

    def verify(self, state: State) -> dict[str, Any]:
        assert self._new is not None
        fix = "leave state.optimizers as it is after INIT"
        if self._old_watch.steps and self._old is not self._new:  # equal if it was replaced earlier
            raise self.not_engaged("the replaced optimizer is still stepping", fix)
        if not self._watch.steps:
            if state.precision == Precision.AMP_FP16:  # steps with overflowing gradients are skipped
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

    def quantised_state(
        self, optimizer: Optimizer, model: nn.Module, bits: int, embedding_bits: int | None, size_setting: str
    ) -> dict[str, Any]:
        """Return evidence of a quantised state, for :meth:`effect`.

        Args:
            optimizer: An optimizer that has stepped.
            model: Its model, with the embeddings.
            bits: Bits per value that some tensors must have.
            embedding_bits: Bits that embeddings must have; None if it does not matter.
            size_setting: Name of the setting that limits the quantised parameters' size.

        Raises:
            NotEngagedError: The state has other bits.
        """
        counts = count_state_bits(optimizer, embedding_weights(model))
        reason = None
        if str(bits) not in counts["tensors_by_state_bits"]:
            reason = f"no parameter has {bits}-bit state"
        elif embedding_bits is not None and (others := set(counts["embedding_state_bits"]) - {embedding_bits}):
            reason = f"embeddings have {min(others)}-bit state"
        if reason is not None:
            least = f"{size_setting} ({getattr(self, size_setting)} now)"
            raise self.not_engaged(reason, f"lower {least}, or remove it: the model is too small for it")
        return counts

    def close(self) -> None:
        if self._new is not None:
            self._watch.remove()
            self._old_watch.remove()
