"""AdamW on bfloat16 weights, with Kahan summation keeping what rounding would lose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from composer.core import State
from torch.optim import Optimizer

from composer_speedups.algorithms.kahan_optimizer.functional import apply_kahan_optimizer
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda, needs_package
from composer_speedups.core.technique import Conflict

_ROUNDS_AWAY = 2**-9  # a bfloat16 number times (1 - less than this) rounds back to itself


class KahanOptimizer(OptimizerSwapTechnique):
    """Training in pure bfloat16: weights, gradients and AdamW's state, with Kahan-compensated updates.

    Raises:
        TechniqueError: At INIT, without torch-optimi, on a GPU without bfloat16, under autocast, with an optimizer
            other than AdamW, and under FSDP.
    """

    name = "kahan_optimizer"
    exactness = "recipe"  # the weights themselves become bfloat16
    must_move = False  # updates smaller than a bfloat16 step wait in the compensation
    conflicts = (
        *OptimizerSwapTechnique.conflicts,
        Conflict(
            "mixed_precision", "kahan_optimizer makes the weights bfloat16, and autocast has nothing left to lower"
        ),
        Conflict("tf32_matmul", "kahan_optimizer makes the weights bfloat16, and no float32 matmul is left"),
    )

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("optimi", "composer_speedups[optimi]")
        if context.device.type == "cuda":
            yield needs_cuda(context, "bfloat16", (8, 0))
        yield Requirement(
            not context.autocast,
            f"its weights are bfloat16 already, and this run has autocast ({context.precision})",
            "set the Trainer's precision to fp32 and remove mixed_precision",
        )

    def swap(self, state: State) -> Optimizer:
        return apply_kahan_optimizer(state.model, state.optimizers[0])

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in state.model.parameters()}
        if dtypes != {"bfloat16"}:
            raise self.not_engaged(f"the weights are {', '.join(sorted(dtypes))}", "leave their dtype as it is")
        compensations = [s.get("kahan_comp") for s in optimizer.state.values()]
        kept = sum(int(c.count_nonzero()) for c in compensations if c is not None)
        stepped = self._watch.moved is not None  # at a learning rate that a warm-up has brought off the ground
        if stepped and not kept:
            raise self.not_engaged("no step left a compensation", "look for code that changes the optimizer's groups")
        return {"weights": "bfloat16", "compensated": kept, "weight_decay": _decay(optimizer)}


def _decay(optimizer: Optimizer) -> str:
    """Whether the decay of a single step is large enough for a bfloat16 weight to show."""
    steps = [float(group["lr"]) * group["weight_decay"] for group in optimizer.param_groups]
    if not any(steps):
        return "none"
    return "applied" if max(steps) >= _ROUNDS_AWAY else "rounds away"
