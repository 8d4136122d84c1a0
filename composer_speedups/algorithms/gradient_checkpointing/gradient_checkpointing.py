"""The gradient checkpointing technique: a block's activations are recomputed in the backward pass."""

from __future__ import annotations

from typing import Any

from composer.core import State
from pydantic import Field

from composer_speedups.algorithms.gradient_checkpointing.functional import apply_gradient_checkpointing
from composer_speedups.algorithms.gradient_checkpointing.recompute import (
    GraphWatch,
    forget_recomputations,
    is_checkpointed,
    recomputations,
)
from composer_speedups.core.technique import Conflict, Stage, Technique
from composer_speedups.core.trainer_state import is_compiled, model_of


class GradientCheckpointing(Technique):
    """Recomputes activations block by block in the backward pass, which saves memory and costs a forward pass.

    Raises:
        TechniqueError: At INIT, without a repeated block, or if transformers' own checkpointing is enabled.
    """

    name = "gradient_checkpointing"
    stage = Stage.SURGERY
    exactness = "exact"
    conflicts = (
        Conflict(
            "cuda_graphs",
            "gradient_checkpointing reads the random generator's state, which is not allowed while a CUDA graph is "
            "captured",
        ),
    )
    trials = ()
    purpose = "saves memory"
    _seen_in_this_process = False  # a second run may reuse compiled code of the first

    every: int = Field(1, ge=1)
    """Recompute one of every n blocks; 1 for all of them."""

    def reset(self) -> None:
        super().reset()
        self._watch = GraphWatch()
        self._evidence: dict[str, Any] = {}

    def engage(self, state: State) -> dict[str, Any]:
        with self.refusals():
            apply_gradient_checkpointing(state.model, self.every)
        blocks = [module for module in model_of(state).modules() if is_checkpointed(module)]
        for block in blocks:
            forget_recomputations(block)  # of an earlier Trainer
        return {"blocks": len(blocks)}

    def watch(self, state: State) -> None:
        if is_compiled(state.model):
            self.watching.enter_context(self._watch.counting())

    def verify(self, state: State) -> dict[str, Any]:
        """Check that blocks were recomputed in the first backward pass, or that its compiled graphs do that."""
        if self._evidence:
            return {}
        counts = [recomputations(module) for module in model_of(state).modules()]
        kind = type(self)
        if sum(counts):
            self._evidence = {"blocks_recomputed": sum(map(bool, counts)), "seen_in": "backward pass"}
        elif self._watch.regions:
            kind._seen_in_this_process = True
            self._evidence = {"regions_recomputed": self._watch.regions, "seen_in": "compiled graphs"}
        elif kind._seen_in_this_process and is_compiled(state.model) and self._watch.graphs == 0:
            self._evidence = {"seen_in": "graphs compiled by an earlier run of this process"}
        else:
            raise self.not_engaged(
                "no block was recomputed in the first backward pass",
                "do not change the blocks after INIT, keep them in training mode, and train at least one of them",
            )
        return self._evidence
