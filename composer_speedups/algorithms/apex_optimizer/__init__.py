from composer_speedups.algorithms.apex_optimizer.apex_optimizer import ApexOptimizer, apply_apex_optimizer

__all__ = ["ApexOptimizer", "apply_apex_optimizer"]
