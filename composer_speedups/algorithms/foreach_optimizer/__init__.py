from composer_speedups.algorithms.foreach_optimizer.foreach_optimizer import (
    ForEachOptimizer,
    apply_foreach_optimizer,
)

__all__ = ["ForEachOptimizer", "apply_foreach_optimizer"]
