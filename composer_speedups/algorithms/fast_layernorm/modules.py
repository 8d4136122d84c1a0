"""Subclasses of nn.LayerNorm that override ``forward`` only, so that existing modules can be given the class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composer_speedups.kernels.host import ran, to_autocast_dtype
from composer_speedups.packing.untouched import is_untouched

Implementation = Literal["low_precision", "triton", "apex"]


class LowPrecisionLayerNorm(nn.LayerNorm):
    """torch's LayerNorm with input, weights and output in the autocast dtype; without autocast, a plain LayerNorm.

    Autocast itself does not cast the input of a LayerNorm, so the residual stream would otherwise be float32.

    The kernel computes mean, variance and the normalization in float32. On a GPU, Composer's LPLayerNorm computes the
    same; on a CPU, it ignores autocast.
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_untouched():
            return super().forward(input)
        x = to_autocast_dtype(input)
        if is_untouched() or not torch.is_autocast_enabled(x.device.type):
            return _report(super().forward(input))
        weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            return _report(F.layer_norm(x, self.normalized_shape, weight, bias, self.eps))


class TritonLayerNorm(nn.LayerNorm):
    """Liger's LayerNorm: one Triton kernel each for the forward and backward pass, computing in float32.

    Input and output have the autocast dtype or, without autocast, the input's dtype. The weights are not cast.

    Source: Liger Kernel, arXiv 2410.10989.
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_untouched():
            return super().forward(input)
        from liger_kernel.ops import LigerLayerNormFunction  # an extra

        if is_untouched():
            return super().forward(input)
        return _report(LigerLayerNormFunction.apply(to_autocast_dtype(input), self.weight, self.bias, self.eps))


class ApexLayerNorm(nn.LayerNorm):
    """Apex's fused CUDA LayerNorm, which computes in float32 and returns the input's dtype.

    Input and output have the autocast dtype or, without autocast, the input's dtype. The weights are cast to that
    dtype, which Apex requires. ``apex.normalization.FusedLayerNorm`` is not used, because its ``forward`` falls back to
    torch's LayerNorm on a CPU and during compilation.

    Source: NVIDIA Apex, apex/normalization/fused_layer_norm.py.
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_untouched():
            return super().forward(input)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine  # an extra

        if is_untouched():
            return super().forward(input)
        x = to_autocast_dtype(input)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return _report(fused_layer_norm_affine(x, weight, bias, self.normalized_shape, self.eps))


LAYERS: dict[Implementation, type[nn.LayerNorm]] = {
    "low_precision": LowPrecisionLayerNorm,
    "triton": TritonLayerNorm,
    "apex": ApexLayerNorm,
}


def _report(output: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        ran(f"layer_norm {str(output.dtype).removeprefix('torch.')}")
    return output


def to_plain(modules: Iterable[nn.Module]) -> None:
    """Give modules of :data:`LAYERS` their stock class back."""
    for module in modules:
        if type(module) in LAYERS.values():
            module.__class__ = nn.LayerNorm


def is_supported(module: nn.Module, implementation: Implementation) -> bool:
    """Return whether the implementation supports this LayerNorm.

    The fused kernels need a weight and a bias, and Liger's kernel normalizes over one dimension only.
    """
    if implementation == "low_precision":
        return True
    affine = module.weight is not None and module.bias is not None
    return affine and (implementation == "apex" or len(module.normalized_shape) == 1)  # type: ignore[arg-type]
