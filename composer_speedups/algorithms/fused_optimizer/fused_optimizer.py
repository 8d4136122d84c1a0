"""torch's fused AdamW."""

from __future__ import annotations

from composer_speedups.core.optimizer_flags import OptimizerFlagTechnique


class FusedOptimizer(OptimizerFlagTechnique):
    """The run's torch optimizer steps with torch's fused kernel.

    Raises:
        TechniqueError: At INIT, when the optimizer has no fused implementation.
    """

    name = "fused_optimizer"
    gain = 1.2
    implementation = "fused"
    operator = "_fused_"
