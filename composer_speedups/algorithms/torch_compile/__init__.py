from composer_speedups.algorithms.torch_compile.torch_compile import TorchCompile, apply_torch_compile

__all__ = ["TorchCompile", "apply_torch_compile"]
