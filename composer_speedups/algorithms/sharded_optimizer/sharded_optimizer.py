"""The sharded optimizer technique: AdamW's state is split over the ranks of DDP."""

from __future__ import annotations

from typing import Any

from composer.core import State
from composer.utils import dist
from torch.optim import Optimizer

from composer_speedups.algorithms.sharded_optimizer.functional import apply_sharded_optimizer
from composer_speedups.algorithms.sharded_optimizer.sharded_adamw import ShardedAdamW
from composer_speedups.core.optimizer_evidence import state_bytes
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.technique import FSDP, Conflict


class ShardedOptimizer(OptimizerSwapTechnique):
    """Splits AdamW's state (8 bytes per parameter) over the ranks of DDP, which is ZeRO stage 1.

    With one rank it engages, so that a run can be resumed on one, and its evidence says that nothing is split.

    Raises:
        TechniqueError: At INIT, with an optimizer other than AdamW, parameters of several dtypes, fewer parameters
            than ranks, or under FSDP, which shards the state itself.
    """

    name = "sharded_optimizer"
    exactness = "rounding"
    conflicts = (
        Conflict(slot="optimizer implementation"),
        Conflict(FSDP, "FSDP already shards the optimizer's state"),
    )
    trials = ()  # tune measures one process, in which nothing is split
    purpose = "saves memory"

    def swap(self, state: State) -> Optimizer:
        optimizer = apply_sharded_optimizer(state.optimizers[0])
        if isinstance(optimizer, ShardedAdamW):
            optimizer.consolidates = True
        return optimizer

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        held = [p for p, entry in optimizer.state.items() if entry]
        counts: list[tuple[int, int]] = dist.all_gather_object((len(held), state_bytes(optimizer)))
        on_all, stepped = sum(count for count, _ in counts), len(optimizer.state)
        if on_all != stepped:
            raise self.not_engaged(
                f"the ranks hold {on_all} states of {stepped} parameters", "step with the optimizer of state.optimizers"
            )
        size = [bytes_of_rank for _, bytes_of_rank in counts]
        evidence: dict[str, Any] = {"ranks": len(size), "state_bytes_by_rank": size, "state_bytes_of_all": sum(size)}
        if len(size) == 1:
            evidence["note"] = "the state is not split, because there is one rank"
        return evidence
