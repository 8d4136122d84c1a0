"""LayerNorm classes with another ``forward``, which replace nn.LayerNorm as the class of existing modules."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Implementation = Literal["low_precision", "triton", "apex"]


class LowPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm with input and output in the autocast dtype; without autocast, a plain LayerNorm.

    torch's kernel computes statistics in float32; inputs, weights and outputs are rounded. Composer's LPLayerNorm is
    the same on a GPU, but ignores the CPU's autocast.
    """

    def forward(self, input: Tensor) -> Tensor:
        x = _to_autocast_dtype(input)
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class TritonLayerNorm(nn.LayerNorm):
    """Liger's LayerNorm: one Triton kernel forward and one backward, which compute in float32.

    Input and output have the autocast dtype, or without autocast, the input's dtype. The weights are not cast, so only
    input and output are rounded.

    Source: Liger Kernel, arXiv 2410.10989.
    """

    def forward(self, input: Tensor) -> Tensor:
        from liger_kernel.ops import LigerLayerNormFunction  # an extra

        return LigerLayerNormFunction.apply(_to_autocast_dtype(input), self.weight, self.bias, self.eps)


class ApexLayerNorm(nn.LayerNorm):
    """Apex's fused CUDA LayerNorm, which computes in float32 and returns the input's dtype.

    Input and output have the autocast dtype, or without autocast, the input's dtype. Apex needs weights in the same
    dtype, so they are cast. ``apex.normalization.FusedLayerNorm`` is not used, because its ``forward`` falls back to
    torch's LayerNorm on a CPU and during compilation.

    Source: NVIDIA Apex, apex/normalization/fused_layer_norm.py.
    """

    def forward(self, input: Tensor) -> Tensor:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine  # an extra

        x = _to_autocast_dtype(input)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return fused_layer_norm_affine(x, weight, bias, self.normalized_shape, self.eps)


LAYERS: dict[Implementation, type[nn.LayerNorm]] = {
    "low_precision": LowPrecisionLayerNorm,
    "triton": TritonLayerNorm,
    "apex": ApexLayerNorm,
}


def fits(module: nn.Module, implementation: Implementation) -> bool:
    """Return whether the implementation supports a LayerNorm.

    The fused kernels need weight and bias, and Liger's kernel normalises over one dimension only.
    """
    if implementation == "low_precision":
        return True
    whole = module.weight is not None and module.bias is not None
    return whole and (implementation == "apex" or len(module.normalized_shape) == 1)  # type: ignore[arg-type]


def _to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast to the autocast dtype. Autocast ignores these kernels, so the residual stream would otherwise be float32."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x
