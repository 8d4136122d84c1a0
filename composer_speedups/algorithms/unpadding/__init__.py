from composer_speedups.algorithms.unpadding.encoders import plan_unpadding
from composer_speedups.algorithms.unpadding.unpadding import Unpadding, apply_unpadding

__all__ = ["Unpadding", "apply_unpadding", "plan_unpadding"]
