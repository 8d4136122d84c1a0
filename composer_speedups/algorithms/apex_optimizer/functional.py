"""NVIDIA Apex's fused AdamW."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch.optim import Optimizer

from composer_speedups.core.errors import first_line
from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError, swap_optimizer

__all__ = ["apply_apex_optimizer"]

MISSING = "NVIDIA Apex is not installed (the package index has no build of it)"
INSTALL = (
    "build it from github.com/NVIDIA/apex with --cpp_ext --cuda_ext, "
    "or use fused_optimizer, which does the same with torch's own kernel"
)


def apply_apex_optimizer(optimizer: Optimizer) -> Optimizer:
    """Put Apex's FusedAdam, in its AdamW mode, in the place of AdamW.

    Args:
        optimizer: A ``torch.optim.AdamW`` that has not stepped; not to be used any more.

    Returns:
        The new optimizer, over the same parameters and groups; ``optimizer`` itself if it is this one already.

    Raises:
        ValueError: Apex or its CUDA kernels are not installed, the optimizer is not AdamW or has stepped, or a
            parameter is not on a GPU.

    Source: apex.optimizers.FusedAdam.
    """
    if not installed():
        raise UnfitOptimizerError(MISSING, INSTALL)
    return swap_optimizer(optimizer, "Apex FusedAdam", _build)


def _build(groups: list[dict[str, Any]]) -> Optimizer:
    from apex.optimizers import FusedAdam

    class ApexFusedAdam(FusedAdam):  # type: ignore[misc]
        __qualname__ = "ApexFusedAdam"

        def zero_grad(self, set_to_none: bool = True) -> None:
            """Takes torch's argument, which torch itself gives while a checkpoint is loaded and Apex does not know."""
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    try:
        return ApexFusedAdam(groups, adam_w_mode=True, bias_correction=True, set_grad_none=True)
    except RuntimeError as error:  # Apex was built without its kernels
        raise UnfitOptimizerError(f"FusedAdam cannot be built ({first_line(error)})", INSTALL) from error


def installed() -> bool:
    """Whether ``apex`` is NVIDIA's: the index has another package of that name."""
    try:
        return importlib.util.find_spec("apex.optimizers") is not None
    except ImportError:
        return False
