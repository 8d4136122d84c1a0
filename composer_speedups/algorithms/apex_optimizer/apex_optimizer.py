"""NVIDIA Apex's fused AdamW."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from composer.core import State
from torch.optim import Optimizer

from composer_speedups.algorithms.optimizer_swap import UnfitOptimizerError, swap_optimizer
from composer_speedups.algorithms.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.algorithms.requirements import Context, Requirement, needs_cuda
from composer_speedups.errors import first_line

__all__ = ["ApexOptimizer", "apply_apex_optimizer"]

_MISSING = "NVIDIA Apex is not installed (the package index has no build of it)"
_INSTALL = (
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
    if not _installed():
        raise UnfitOptimizerError(_MISSING, _INSTALL)
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
        raise UnfitOptimizerError(f"FusedAdam cannot be built ({first_line(error)})", _INSTALL) from error


def _installed() -> bool:
    """Whether ``apex`` is NVIDIA's: the index has another package of that name."""
    try:
        return importlib.util.find_spec("apex.optimizers") is not None
    except ImportError:
        return False


class ApexOptimizer(OptimizerSwapTechnique):
    """The run's AdamW becomes Apex's FusedAdam: the update of many parameters in one kernel.

    Args:
        on_unavailable: See :class:`Technique`.

    Raises:
        TechniqueError: At INIT, without Apex or a GPU, with an optimizer other than AdamW, and under FSDP.
    """

    name = "apex_optimizer"

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield Requirement(_installed(), _MISSING, _INSTALL)
        yield needs_cuda(context, "Apex's FusedAdam")

    def swap(self, state: State) -> Optimizer:
        return apply_apex_optimizer(state.optimizers[0])

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        counted = [group["step"] for group in optimizer.param_groups if group.get("step")]
        if not counted:
            raise self.not_engaged("FusedAdam counted no step", "leave state.optimizers as it is after INIT")
        return {"apex_steps": int(max(torch.as_tensor(c).item() for c in counted))}
