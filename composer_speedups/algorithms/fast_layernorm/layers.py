"""LayerNorm modules that nn.LayerNorm turns into in place: same parameters and name, another ``forward``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Implementation = Literal["low_precision", "triton", "apex"]


class LowPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm that takes and gives the autocast dtype; without autocast, plain LayerNorm.

    Statistics are still accumulated in float32 by torch's kernel; inputs, weights and outputs are rounded.
    Composer's LPLayerNorm does the same on a GPU but does not see the CPU's autocast.
    """

    def forward(self, input: Tensor) -> Tensor:
        x = _to_autocast_dtype(input)
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class TritonLayerNorm(nn.LayerNorm):
    """Liger's LayerNorm: one Triton kernel forward, one backward, both computing in float32.

    Takes and gives the autocast dtype, or the input's without autocast. The weights are read as they are, so
    nothing but input and output is rounded.

    Source: Liger Kernel, arXiv 2410.10989.
    """

    def forward(self, input: Tensor) -> Tensor:
        from liger_kernel.ops import LigerLayerNormFunction  # an extra

        return LigerLayerNormFunction.apply(_to_autocast_dtype(input), self.weight, self.bias, self.eps)


class ApexLayerNorm(nn.LayerNorm):
    """Apex's fused CUDA LayerNorm, which computes in float32 and gives the dtype it was given.

    Takes and gives the autocast dtype, or the input's without autocast; Apex wants the weights in the same one.
    The function is called rather than ``apex.normalization.FusedLayerNorm``, whose ``forward`` goes back to
    torch's LayerNorm on the CPU and while it is being compiled.

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
    """Whether the implementation can take over a LayerNorm.

    The fused kernels need weight and bias, and Liger's normalises over one dimension only.
    """
    if implementation == "low_precision":
        return True
    whole = module.weight is not None and module.bias is not None
    return whole and (implementation == "apex" or len(module.normalized_shape) == 1)  # type: ignore[arg-type]


def _to_autocast_dtype(x: Tensor) -> Tensor:
    """Autocast itself passes over these kernels; without the cast, the residual stream would stay float32."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x
