"""The fused optimizer technique: one kernel for the update of many parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from composer.core import Precision, State
from pydantic import Field

from composer_speedups.algorithms.fused_optimizer.functional import apply_fused_optimizer
from composer_speedups.algorithms.fused_optimizer.triton_step import triton_step_of
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.optimizer_technique import OptimizerFlagTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda, needs_triton
from composer_speedups.surgery.optimizer_swap import UnfitOptimizerError


class FusedOptimizer(OptimizerFlagTechnique):
    """Makes the run's torch optimizer step with torch's fused kernel, or with a Triton kernel.

    Raises:
        TechniqueError: At INIT, if the optimizer has no fused implementation; for ``kernel: triton``, if it is not
            AdamW, its parameters are not contiguous float32 tensors on a GPU, or the run is fp16 or sharded.
    """

    name = "fused_optimizer"
    gain = 1.2
    implementation = "fused"
    operator = "_fused_"

    kernel: Literal["torch", "triton"] = Field("torch")
    """The kernel; triton computes AdamW in one launch for all parameters of a group."""

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if self.kernel == "triton":
            fix = "set kernel: torch"
            yield needs_cuda(context, "kernel: triton")._replace(fix=fix)
            yield from (needed._replace(fix=f"{needed.fix}, or {fix}") for needed in needs_triton())
            yield Requirement(not context.sharded, "kernel: triton needs whole parameters", fix)
            scales = context.precision == Precision.AMP_FP16.value
            yield Requirement(not scales, "kernel: triton does not support loss scaling", f"{fix}, or train in bf16")

    def set_flag(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        try:
            return apply_fused_optimizer(optimizer, self.kernel)
        except UnfitOptimizerError:
            raise
        except ValueError as error:  # of the Triton kernel
            raise TechniqueError(self.name, str(error), "set kernel: torch") from error

    def operators(self, state: State) -> dict[str, int]:
        if self.kernel == "torch":
            return super().operators(state)
        step = triton_step_of(state.optimizers[0])
        return {"triton_adamw": step.updates} if step is not None and step.updates and not step.left_to_torch else {}
