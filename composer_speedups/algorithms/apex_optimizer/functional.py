"""Replace AdamW by NVIDIA Apex's FusedAdam."""

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
    "or use fused_optimizer, which has the same effect with torch's kernel"
)


def apply_apex_optimizer(optimizer: Optimizer) -> Optimizer:
    """Replace AdamW by Apex's FusedAdam in its AdamW mode.

    Args:
        optimizer: A ``torch.optim.AdamW`` that has not stepped; it must not be used afterwards.

    Returns:
        The new optimizer with the same parameters and groups, or ``optimizer`` if it already is Apex's.

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
            """Accept ``set_to_none``, which torch passes while a checkpoint is loaded and Apex does not support."""
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    try:
        return ApexFusedAdam(groups, adam_w_mode=True, bias_correction=True, set_grad_none=True)
    except RuntimeError as error:  # Apex was built without its kernels
        raise UnfitOptimizerError(f"FusedAdam cannot be built ({first_line(error)})", INSTALL) from error


def installed() -> bool:
    """Return whether ``apex`` is NVIDIA's; the package index has another package with that name."""
    try:
        return importlib.util.find_spec("apex.optimizers") is not None
    except ImportError:
        return False
