"""The foreach optimizer technique: multi-tensor kernels for the optimizer step."""

from __future__ import annotations

from composer_speedups.core.optimizer_technique import OptimizerFlagTechnique


class ForEachOptimizer(OptimizerFlagTechnique):
    """Makes the run's torch optimizer step with multi-tensor (horizontally batched) kernels.

    Raises:
        TechniqueError: At INIT, if the optimizer has no foreach implementation, or its settings rule it out, such as a
            learning rate that is a tensor.
    """

    name = "foreach_optimizer"
    gain = 1.04
    implementation = "foreach"
    operator = "_foreach_"
