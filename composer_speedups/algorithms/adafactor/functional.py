"""Replace AdamW by Adafactor."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError, swap_optimizer

__all__ = ["apply_adafactor"]


def apply_adafactor(optimizer: Optimizer, scale_parameter: bool = False) -> Optimizer:
    """Replace AdamW by Adafactor, which has no first moment, and second moments factored into rows and columns.

    Learning rates and their schedules are used; Adafactor's relative step size is disabled. AdamW's ``betas`` and
    ``eps`` are not used: Adafactor decays its moments by ``1 - step ** -0.8`` and clips updates at an RMS of 1.

    Args:
        optimizer: A ``torch.optim.AdamW`` that has not stepped; it must not be used afterwards.
        scale_parameter: Multiply the learning rate by the RMS of each parameter, as in the paper. Default False, so
            that a learning rate tuned for AdamW has a similar effect.

    Returns:
        The new optimizer with the same parameters and groups, or ``optimizer`` if it already is this Adafactor.

    Raises:
        ValueError: The optimizer is not AdamW, has stepped, or has no matrix to factor.

    Source: Shazeer and Stern, "Adafactor" (arXiv 1804.04235), as implemented in transformers. torch.optim.Adafactor is
    not used, because it always scales by the parameters' RMS, which is far below 1 for BERT's matrices.
    """
    from transformers.optimization import Adafactor

    if not any(p.ndim > 1 for group in optimizer.param_groups for p in group["params"]):
        raise UnfitOptimizerError("the optimizer has no matrix whose second moments could be factored", "use AdamW")

    def build(groups: list[dict[str, Any]]) -> Optimizer:
        kept = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
        return Adafactor(kept, scale_parameter=scale_parameter, relative_step=False, warmup_init=False)

    return swap_optimizer(optimizer, f"Adafactor(scale_parameter={scale_parameter})", build)
