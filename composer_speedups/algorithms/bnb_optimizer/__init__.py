from composer_speedups.algorithms.bnb_optimizer.bnb_optimizer import BnbOptimizer, apply_bnb_optimizer

__all__ = ["BnbOptimizer", "apply_bnb_optimizer"]
