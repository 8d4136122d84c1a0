"""The offloaded optimizer technique: AdamW's state and step on the CPU."""

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
    """Moves AdamW's state (8 bytes per parameter) and its step to the CPU.

    Raises:
        TechniqueError: At INIT, without a GPU (except with ``allow_cpu``), with an optimizer other than AdamW, or
            under FSDP, which has its own offloading.
    """

    name = "offloaded_optimizer"
    exactness = "rounding"
    computes_on_host = True
    trials = ()
    purpose = "saves memory"

    allow_cpu: bool = Field(False)
    """Engage in runs on a CPU, too, where it saves nothing; otherwise it is refused."""

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if not self.allow_cpu:
            yield needs_cuda(context, "offloading the optimizer")

    def swap(self, state: State) -> Optimizer:
        return apply_offloaded_optimizer(state.optimizers[0])

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        elsewhere = {tensor.device.type for _, tensor in state_tensors(optimizer)} - {"cpu"}
        if elsewhere:
            raise self.not_engaged(f"its state is on {', '.join(sorted(elsewhere))}", "do not move the state")
        assert isinstance(optimizer, HostAdamW)
        devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
        return {"state_on": "cpu", "weights_on": sorted(devices), "copied_bytes": optimizer.copied_bytes}
