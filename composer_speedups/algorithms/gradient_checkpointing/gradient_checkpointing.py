"""Gradient checkpointing: a block's activations are recomputed in the backward pass, not kept."""

from __future__ import annotations

from typing import Any, ClassVar

from composer.core import Event, State

from composer_speedups.algorithms.gradient_checkpointing.functional import apply_gradient_checkpointing
from composer_speedups.algorithms.gradient_checkpointing.recompute import GraphWatch, is_checkpointed, recomputations
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.technique import OnUnavailable, Stage, Technique
from composer_speedups.core.trainer_state import is_compiled, model_of

__all__ = ["GradientCheckpointing"]


class GradientCheckpointing(Technique):
    """Activations recomputed block by block in the backward pass: less memory, one more forward pass.

    Args:
        every: Every how many blocks one is recomputed. Default 1, all of them.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: ``every`` below 1.
        TechniqueError: At INIT, without a repeated block or with transformers' own checkpointing on.
    """

    name = "gradient_checkpointing"
    stage = Stage.SURGERY
    clashes: ClassVar[dict[str, str]] = {
        "cuda_graphs": "dropout's state is read from the generator before each block, which a capture forbids"
    }
    _seen_in_this_process = False  # a second run may reuse what the first compiled

    def __init__(self, every: int = 1, *, on_unavailable: OnUnavailable = "stop") -> None:
        super().__init__(on_unavailable=on_unavailable)
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self.every = every
        self._watch = GraphWatch()
        self._evidence: dict[str, Any] = {}

    def engage(self, state: State) -> dict[str, Any]:
        try:
            apply_gradient_checkpointing(state.model, self.every)
        except ValueError as error:
            raise TechniqueError(self.name, str(error), "take it out for this model") from error
        return {"blocks": sum(is_checkpointed(module) for module in model_of(state).modules())}

    def observe(self, event: Event, state: State) -> None:
        if event == Event.BEFORE_FORWARD and is_compiled(state.model):
            self._watch.start()
        elif event == Event.AFTER_FORWARD:
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
