"""The fused optimizer technique: torch's fused kernel for the optimizer step."""

from __future__ import annotations

from composer_speedups.core.optimizer_flags import OptimizerFlagTechnique


class FusedOptimizer(OptimizerFlagTechnique):
    """Makes the run's torch optimizer step with torch's fused kernel.

    Raises:
        TechniqueError: At INIT, if the optimizer has no fused implementation.
    """

    name = "fused_optimizer"
    gain = 1.2
    implementation = "fused"
    operator = "_fused_"
