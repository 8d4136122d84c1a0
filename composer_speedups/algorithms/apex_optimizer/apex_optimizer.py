"""The Apex technique: NVIDIA Apex's fused AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from composer.core import State
from torch.optim import Optimizer

from composer_speedups.algorithms.apex_optimizer.functional import INSTALL, MISSING, apply_apex_optimizer, installed
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda


class ApexOptimizer(OptimizerSwapTechnique):
    """Replaces the run's AdamW by Apex's FusedAdam, which updates many parameters in one kernel.

    Raises:
        TechniqueError: At INIT, without Apex or a GPU, with an optimizer other than AdamW, or under FSDP.
    """

    name = "apex_optimizer"
    exactness = "rounding"

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield Requirement(installed(), MISSING, INSTALL)
        yield needs_cuda(context, "Apex's FusedAdam")

    def swap(self, state: State) -> Optimizer:
        return apply_apex_optimizer(state.optimizers[0])

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        counted = [group["step"] for group in optimizer.param_groups if group.get("step")]
        if not counted:
            raise self.not_engaged("FusedAdam counted no step", "do not change state.optimizers after INIT")
        return {"apex_steps": int(max(torch.as_tensor(c).item() for c in counted))}
