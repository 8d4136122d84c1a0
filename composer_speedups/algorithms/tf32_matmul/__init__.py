from composer_speedups.algorithms.tf32_matmul.tf32_matmul import TF32Matmul, apply_tf32_matmul

__all__ = ["TF32Matmul", "apply_tf32_matmul"]
