"""Adafactor: a matrix's second moments kept as one number a row and one a column."""

from __future__ import annotations

from typing import Any

from composer.core import State
from torch.optim import Optimizer

from composer_speedups.algorithms.optimizer_swap import UnfitOptimizerError, swap_optimizer
from composer_speedups.algorithms.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.algorithms.technique import OnUnavailable

__all__ = ["AdafactorOptimizer", "apply_adafactor"]

_ADAMW_BYTES = 8  # two float32 moments a parameter


def apply_adafactor(optimizer: Optimizer, scale_parameter: bool = False) -> Optimizer:
    """Put Adafactor in the place of AdamW: no first moment, and second moments factored into rows and columns.

    Learning rates and their schedules stay in force; Adafactor's own relative step size is off. ``betas`` and
    ``eps`` are AdamW's alone: Adafactor decays its moments by ``1 - step ** -0.8`` and clips updates at an RMS of 1.

    Args:
        optimizer: A ``torch.optim.AdamW`` that has not stepped; not to be used any more.
        scale_parameter: Multiply the learning rate by the RMS of each parameter, as the paper does. Default False,
            so that a learning rate tuned for AdamW keeps its size.

    Returns:
        The new optimizer, over the same parameters and groups; ``optimizer`` itself if it is this one already.

    Raises:
        ValueError: The optimizer is not AdamW, has stepped, or holds no matrix to factor.

    Source: Shazeer and Stern, "Adafactor" (arXiv 1804.04235), as implemented in transformers. torch.optim's own
    always scales by the parameters' RMS, far below 1 for BERT's matrices.
    """
    from transformers.optimization import Adafactor

    if not any(p.ndim > 1 for group in optimizer.param_groups for p in group["params"]):
        raise UnfitOptimizerError("the optimizer holds no matrix whose second moments could be factored", "use AdamW")

    def build(groups: list[dict[str, Any]]) -> Optimizer:
        kept = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
        return Adafactor(kept, scale_parameter=scale_parameter, relative_step=False, warmup_init=False)

    return swap_optimizer(optimizer, f"Adafactor(scale_parameter={scale_parameter})", build)


class AdafactorOptimizer(OptimizerSwapTechnique):
    """The run's AdamW becomes Adafactor, with a small fraction of its state.

    Args:
        scale_parameter: Multiply the learning rate by the RMS of each parameter. Default False.
        on_unavailable: See :class:`Technique`.

    Raises:
        TechniqueError: At INIT, when the optimizer is not AdamW or holds no matrix, and under FSDP.
    """

    name = "adafactor"

    def __init__(self, scale_parameter: bool = False, *, on_unavailable: OnUnavailable = "stop") -> None:
        super().__init__(on_unavailable=on_unavailable)
        self.scale_parameter = scale_parameter

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
