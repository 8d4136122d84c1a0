from composer_speedups.algorithms.fast_layernorm.fast_layernorm import FastLayerNorm, apply_fast_layernorm

__all__ = ["FastLayerNorm", "apply_fast_layernorm"]
