from composer_speedups.algorithms.float8_linear.float8_linear import Float8Linear, apply_float8_linear

__all__ = ["Float8Linear", "apply_float8_linear"]
