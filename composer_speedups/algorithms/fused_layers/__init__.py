from composer_speedups.algorithms.fused_layers.fused_layers import FusedLayers, apply_fused_layers

__all__ = ["FusedLayers", "apply_fused_layers"]
