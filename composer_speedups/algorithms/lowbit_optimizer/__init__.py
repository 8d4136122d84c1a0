from composer_speedups.algorithms.lowbit_optimizer.lowbit_optimizer import LowBitOptimizer, apply_lowbit_optimizer

__all__ = ["LowBitOptimizer", "apply_lowbit_optimizer"]
