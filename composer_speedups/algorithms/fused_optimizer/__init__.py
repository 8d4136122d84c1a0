from composer_speedups.algorithms.fused_optimizer.fused_optimizer import FusedOptimizer, apply_fused_optimizer

__all__ = ["FusedOptimizer", "apply_fused_optimizer"]
