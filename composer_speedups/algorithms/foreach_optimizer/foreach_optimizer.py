"""AdamW with horizontally batched kernels."""

from __future__ import annotations

from composer_speedups.core.optimizer_flags import OptimizerFlagTechnique


class ForEachOptimizer(OptimizerFlagTechnique):
    """The run's torch optimizer steps with horizontally batched kernels.

    Raises:
        TechniqueError: At INIT, when the optimizer has no foreach implementation.
    """

    name = "foreach_optimizer"
    gain = 1.04
    implementation = "foreach"
    operator = "_foreach_"
