"""Subclasses of nn.LayerNorm that override ``forward`` only, so that existing modules can be given the class.

Input and output have the autocast dtype or, without autocast, the input's dtype. Autocast itself does not cast the
input of a LayerNorm, so the residual stream would otherwise be float32. All kernels compute in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composer_speedups.kernels.common import ran, to_autocast_dtype
from composer_speedups.packing.untouched import is_untouched


class LowPrecisionLayerNorm(nn.LayerNorm):
    """torch's LayerNorm, whose weights are cast to the input's dtype; on a GPU, Composer's LPLayerNorm is the same."""

    def forward(self, input: Tensor) -> Tensor:
        if is_untouched():
            return super().forward(input)
        x = to_autocast_dtype(input)
        weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            return _report(F.layer_norm(x, self.normalized_shape, weight, bias, self.eps))


class TritonLayerNorm(nn.LayerNorm):
    """Liger's LayerNorm, one Triton kernel each for the forward and backward pass; its weights are not cast.

    Source: Liger Kernel, arXiv 2410.10989.
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_untouched():
            return super().forward(input)
        from liger_kernel.ops import LigerLayerNormFunction  # an extra

        return _report(LigerLayerNormFunction.apply(to_autocast_dtype(input), self.weight, self.bias, self.eps))


class ApexLayerNorm(nn.LayerNorm):
    """Apex's fused CUDA LayerNorm, whose weights are cast to the input's dtype, as Apex requires.

    ``apex.normalization.FusedLayerNorm`` is not used, because its ``forward`` falls back to torch's LayerNorm on a CPU
    and during compilation.

    Source: NVIDIA Apex, apex/normalization/fused_layer_norm.py.
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_untouched():
            return super().forward(input)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine  # an extra

        x = to_autocast_dtype(input)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return _report(fused_layer_norm_affine(x, weight, bias, self.normalized_shape, self.eps))


LAYERS: dict[str, type[nn.LayerNorm]] = {
    "low_precision": LowPrecisionLayerNorm,
    "triton": TritonLayerNorm,
    "apex": ApexLayerNorm,
}


def _report(output: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        ran(f"layer_norm {str(output.dtype).removeprefix('torch.')}")
    return output


def to_plain(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.__class__ = nn.LayerNorm
