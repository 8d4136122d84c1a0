from composer_speedups.algorithms.mixed_precision.mixed_precision import MixedPrecision, apply_mixed_precision

__all__ = ["MixedPrecision", "apply_mixed_precision"]
