from composer_speedups.algorithms.adafactor.adafactor import AdafactorOptimizer, apply_adafactor

__all__ = ["AdafactorOptimizer", "apply_adafactor"]
