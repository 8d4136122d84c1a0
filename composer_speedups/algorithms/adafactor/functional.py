"""Adafactor: a matrix's second moments kept as one number a row and one a column."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError, swap_optimizer

__all__ = ["apply_adafactor"]


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
