"""The Adafactor technique: a matrix's second moments are stored as one number per row and one per column."""

from __future__ import annotations

from typing import Any

from composer.core import State
from pydantic import Field
from torch.optim import Optimizer

from composer_speedups.algorithms.adafactor.functional import apply_adafactor
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique

_ADAMW_BYTES = 8  # two float32 moments per parameter


class AdafactorOptimizer(OptimizerSwapTechnique):
    """Replaces the run's AdamW by Adafactor, whose state is a small fraction of AdamW's.

    Raises:
        TechniqueError: At INIT, if the optimizer is not AdamW or has no matrix, or under FSDP.
    """

    name = "adafactor"
    exactness = "recipe"
    purpose = "saves memory"
    gain = 0.75

    scale_parameter: bool = Field(False)
    """Multiply the learning rate by the RMS of each parameter."""

    def swap(self, state: State) -> Optimizer:
        return apply_adafactor(state.optimizers[0], self.scale_parameter)

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        matrices = {p: s for p, s in optimizer.state.items() if p.ndim > 1 and s}
        factored = [
            s for p, s in matrices.items() if _elements(s) <= p.numel() // p.shape[-1] + p.numel() // p.shape[-2] + 1
        ]
        if not factored:
            raise self.not_engaged("no matrix has factored second moments", "look for code that changes its state")
        stepped = sum(p.numel() for p, s in optimizer.state.items() if s)
        return {"factored": f"{len(factored)} of {len(matrices)}", "adamw_state_bytes": _ADAMW_BYTES * stepped}


def _elements(state: dict[str, Any]) -> int:
    return sum(value.numel() for value in state.values() if hasattr(value, "numel"))
