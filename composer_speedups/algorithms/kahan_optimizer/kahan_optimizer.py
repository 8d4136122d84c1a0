"""The Kahan optimizer technique: AdamW on bfloat16 weights, with Kahan summation for what rounding would lose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from composer.core import State
from torch.optim import Optimizer

from composer_speedups.algorithms.kahan_optimizer.functional import apply_kahan_optimizer
from composer_speedups.core.optimizer_technique import OptimizerSwapTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda, needs_package
from composer_speedups.core.technique import Conflict

_ROUNDS_AWAY = 2**-9  # for any smaller x, a bfloat16 number times (1 - x) rounds to the same number


class KahanOptimizer(OptimizerSwapTechnique):
    """Trains in pure bfloat16 (weights, gradients and AdamW's state), with Kahan-compensated updates.

    Raises:
        TechniqueError: At INIT, without torch-optimi, on a GPU without bfloat16, under autocast, with an optimizer
            other than AdamW, or under FSDP.
    """

    name = "kahan_optimizer"
    exactness = "recipe"  # the weights themselves become bfloat16
    purpose = "saves memory"
    must_move = False  # updates below bfloat16's resolution accumulate in the compensation
    conflicts = (
        *OptimizerSwapTechnique.conflicts,
        Conflict(
            "mixed_precision", "kahan_optimizer converts the weights to bfloat16, so autocast would have no effect"
        ),
        Conflict("tf32_matmul", "kahan_optimizer converts the weights to bfloat16, so there are no float32 matmuls"),
    )

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("optimi", ".[optimi]")
        if context.device.type == "cuda":
            yield needs_cuda(context, "bfloat16", (8, 0))
        yield Requirement(
            not context.autocast,
            f"its weights are bfloat16, and this run has autocast ({context.precision})",
            "set the Trainer's precision to fp32 and remove mixed_precision",
        )

    def swap(self, state: State) -> Optimizer:
        return apply_kahan_optimizer(state.model, state.optimizers[0])

    def effect(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in state.model.parameters()}
        if dtypes != {"bfloat16"}:
            raise self.not_engaged(f"the weights are {', '.join(sorted(dtypes))}", "do not change their dtype")
        compensations = [s.get("kahan_comp") for s in optimizer.state.values()]
        kept = sum(int(c.count_nonzero()) for c in compensations if c is not None)
        stepped = self._watch.moved is not None  # with a learning rate above 0, which a warm-up starts at
        if stepped and not kept:
            raise self.not_engaged("no step left a compensation", "look for code that changes the optimizer's groups")
        return {"weights": "bfloat16", "compensated": kept, "weight_decay": _decay(optimizer)}


def _decay(optimizer: Optimizer) -> str:
    """Return whether the weight decay of a single step changes a bfloat16 weight."""
    steps = [float(group["lr"]) * group["weight_decay"] for group in optimizer.param_groups]
    if not any(steps):
        return "none"
    return "applied" if max(steps) >= _ROUNDS_AWAY else "rounds away"
