"""AdamW's state, and its step, in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from composer.core import State
from pydantic import Field
from torch.optim import Optimizer

from composer_speedups.algorithms.offloaded_optimizer.functional import apply_offloaded_optimizer
from composer_speedups.algorithms.offloaded_optimizer.host_adamw import HostAdamW
from composer_speedups.core.optimizer_evidence import state_tensors
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda


class OffloadedOptimizer(OptimizerSwapTechnique):
    """AdamW's state leaves the GPU, 8 bytes a parameter, and the CPU does its step.

    Raises:
        TechniqueError: At INIT, without a GPU (but for ``allow_cpu``), with an optimizer other than AdamW, and
            under FSDP, which offloads in its own way.
    """

    name = "offloaded_optimizer"
    exactness = "rounding"
    computes_on_host = True
    trials = ()
    never_tried = "it trades time for memory, and this search is for time"

    allow_cpu: bool = Field(False)
    """Engage in a run on the CPU too, where it saves nothing; otherwise it is refused there."""

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if not self.allow_cpu:
            yield needs_cuda(context, "taking the optimizer off the GPU")

    def swap(self, state: State) -> Optimizer:
        return apply_offloaded_optimizer(state.optimizers[0])

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        elsewhere = {tensor.device.type for _, tensor in state_tensors(optimizer)} - {"cpu"}
        if elsewhere:
            raise self.not_engaged(f"its state is on {', '.join(sorted(elsewhere))}", "leave the state where it is")
        assert isinstance(optimizer, HostAdamW)
        devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
        return {"state_on": "cpu", "weights_on": sorted(devices), "copied_bytes": optimizer.copied_bytes}
