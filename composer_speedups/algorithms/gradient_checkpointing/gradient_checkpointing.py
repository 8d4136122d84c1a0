"""Gradient checkpointing: a block's activations are recomputed in the backward pass, not kept."""

from __future__ import annotations

from typing import Any

from composer.core import State
from pydantic import Field

from composer_speedups.algorithms.gradient_checkpointing.functional import apply_gradient_checkpointing
from composer_speedups.algorithms.gradient_checkpointing.recompute import GraphWatch, is_checkpointed, recomputations
from composer_speedups.core.technique import Conflict, Stage, Technique
from composer_speedups.core.trainer_state import is_compiled, model_of


class GradientCheckpointing(Technique):
    """Activations recomputed block by block in the backward pass: less memory, one more forward pass.

    Raises:
        TechniqueError: At INIT, without a repeated block or with transformers' own checkpointing on.
    """

    name = "gradient_checkpointing"
    stage = Stage.SURGERY
    exactness = "exact"
    conflicts = (
        Conflict(
            "cuda_graphs", "dropout's state is read from the generator before each block, which a capture forbids"
        ),
    )
    trials = ()
    never_tried = "it trades time for memory, and this search is for time"
    _seen_in_this_process = False  # a second run may reuse what the first compiled

    every: int = Field(1, ge=1)
    """Every how many blocks one is recomputed; 1 is all of them."""

    def reset(self) -> None:
        super().reset()
        self._watch = GraphWatch()
        self._evidence: dict[str, Any] = {}

    def engage(self, state: State) -> dict[str, Any]:
        with self.refusals():
            apply_gradient_checkpointing(state.model, self.every)
        return {"blocks": sum(is_checkpointed(module) for module in model_of(state).modules())}

    def watch(self, state: State) -> None:
        if is_compiled(state.model):
            self._watch.start()

    def stop_watching(self, state: State) -> None:
        self._watch.stop()

    def close(self) -> None:
        self._watch.stop()  # also after a forward pass that raised

    def verify(self, state: State) -> dict[str, Any]:
        """What ran again in the first batch's backward pass, or what its compiled graphs say will."""
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
                "keep the blocks as they are after INIT and in training mode, and train at least one of them",
            )
        return self._evidence
