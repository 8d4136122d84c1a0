from composer_speedups.algorithms.gradient_checkpointing.gradient_checkpointing import (
    GradientCheckpointing,
    apply_gradient_checkpointing,
)

__all__ = ["GradientCheckpointing", "apply_gradient_checkpointing"]
