"""torch's fused AdamW."""

from __future__ import annotations

from composer_speedups.core.optimizer_flags import OptimizerFlagTechnique

__all__ = ["FusedOptimizer"]


class FusedOptimizer(OptimizerFlagTechnique):
    """The run's torch optimizer steps with torch's fused kernel.

    Args:
        on_unavailable: See :class:`Technique`.

    Raises:
        TechniqueError: At INIT, when the optimizer has no fused implementation.
    """

    name = "fused_optimizer"
    implementation = "fused"
    operator = "_fused_"
