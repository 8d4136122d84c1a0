from composer_speedups.algorithms.kahan_optimizer.kahan_optimizer import KahanOptimizer, apply_kahan_optimizer

__all__ = ["KahanOptimizer", "apply_kahan_optimizer"]
