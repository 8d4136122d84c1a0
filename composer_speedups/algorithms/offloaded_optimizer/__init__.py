from composer_speedups.algorithms.offloaded_optimizer.offloaded_optimizer import (
    OffloadedOptimizer,
    apply_offloaded_optimizer,
)

__all__ = ["OffloadedOptimizer", "apply_offloaded_optimizer"]
